"""Sealing a rank's part: in this process, or in a helper that gets the part's key alone."""

from __future__ import annotations

import json
import mmap
import os
import re
import socket
import time
from collections.abc import Sequence
from typing import Any, Final

import torch

from sealring import _native
from sealring.core.identity.process import shut_out_debuggers
from sealring.errors import VaultError, WorkerFailed
from sealring.formats.strict import read_json
from sealring.vault.children import SHORTEST_WAIT, Child
from sealring.vault.objects import Copy, Part, digest_of
from sealring.vault.sealed import Place, shown

_WORK_SECONDS: Final = 120.0
"""For a helper to seal a part and to answer, and longer by the part's size."""
_BYTES_A_SECOND: Final = 1 << 20
"""A helper that seals more slowly than this does not work."""
_LARGEST_ANSWER: Final = 4096
_LONGEST_REASON: Final = 300
_COMMITMENT: Final = re.compile(r"[0-9a-f]{64}")


def seal_here(copy: Copy, name: str, buffers: Sequence[torch.Tensor]) -> tuple[Part, bytes]:
    """The part, and the digests of its chunks."""
    plain: list[Any] = [buffer.numpy() for buffer in buffers]
    return copy.seal_part(name, [plain])


def seal_in_helper(copy: Copy, name: str, buffers: Sequence[torch.Tensor]) -> tuple[Part, bytes]:
    """Stages the bytes in memory that only the two processes share, and hands over one key.

    The helper knows neither the vault's key, nor the checkpoint's, nor the rank's identity: this
    process computes the digests of what it staged, and signs them.
    """
    shut_out_debuggers()  # before the plaintext is staged
    size = sum(buffer.numel() for buffer in buffers)
    memory = os.memfd_create("sealring-staging", os.MFD_CLOEXEC)
    try:
        os.ftruncate(memory, max(1, size))
        with mmap.mmap(memory, max(1, size)) as staged:
            at = 0
            for buffer in buffers:
                plain: Any = buffer.numpy()
                staged[at : at + buffer.numel()] = memoryview(plain)
                at += buffer.numel()
            with memoryview(staged) as whole:
                digests = _native.chunk_digests(whole[:size])
        with copy.new_part(name) as target:
            commitment = _sealed_by_helper(copy.place, name, size, [memory, target])
        return Part(name, size, commitment, digest_of(digests)), digests
    finally:
        os.close(memory)


def _sealed_by_helper(place: Place, name: str, size: int, files: list[int]) -> str:
    """The part's commitment. The helper starts with nothing secret: see children.py."""
    helper = Child("sealring.vault.sealing_process")
    try:
        deadline = time.monotonic() + _WORK_SECONDS + size / _BYTES_A_SECOND
        answer = _hand_over(helper.connection, place, name, size, files, deadline)
    except OSError as problem:
        raise WorkerFailed(
            f"the process that seals {name} ended before it had finished: {problem}"
        ) from problem
    finally:
        helper.close()
    return _commitment(answer, name)


def _hand_over(
    here: socket.socket, place: Place, name: str, size: int, files: list[int], deadline: float
) -> bytes:
    """What the helper answers."""
    order = {
        "suite": place.suite,
        "context": place.context(name).hex(),
        "part": name,
        "bytes": size,
    }
    text = json.dumps(order).encode()
    here.settimeout(deadline - time.monotonic())
    socket.send_fds(here, [len(text).to_bytes(4, "big")], files)
    here.sendall(text)
    here.sendall(memoryview(place.part_key(name)))
    return _answer(here, deadline)


def _answer(here: socket.socket, deadline: float) -> bytes:
    """All that the helper sends until it closes the connection: in time, and not endless."""
    came = bytearray()
    while len(came) <= _LARGEST_ANSWER:
        here.settimeout(max(SHORTEST_WAIT, deadline - time.monotonic()))
        piece = here.recv(_LARGEST_ANSWER)
        if not piece:
            break
        came += piece
    if not came:
        raise ConnectionError("it did not answer")
    return bytes(came)


def _commitment(answer: bytes, name: str) -> str:
    """From the answer of a helper that an attacker may have taken over."""
    try:
        document = read_json(answer)
    except ValueError:
        document = None
    found = document if isinstance(document, dict) else {}
    if isinstance(error := found.get("error"), str):
        reason = shown(error, _LONGEST_REASON)
        if isinstance(number := found.get("errno"), int):  # it could not write the target
            raise OSError(number, reason)
        raise VaultError(f"{name} could not be sealed: {reason}")
    if not isinstance(made := found.get("commitment"), str) or not _COMMITMENT.fullmatch(made):
        raise WorkerFailed(f"the process that seals {name} gave an answer that is none")
    return made
