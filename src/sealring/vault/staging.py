"""Sealing a rank's part: in this process, or in a helper that gets the part's key alone."""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Final

import torch

from sealring import _native
from sealring.errors import WorkerFailed
from sealring.identity.process import shut_out_debuggers
from sealring.vault.children import START_SECONDS, Door, without_secrets
from sealring.vault.objects import Copy, Part, digest_of
from sealring.vault.sealed import Place

_START_SECONDS: Final = START_SECONDS
_END_SECONDS: Final = 5.0
_BYTES_A_SECOND: Final = 1 << 20
"""A helper that seals more slowly than this does not work."""


def seal_here(copy: Copy, name: str, buffers: Sequence[torch.Tensor]) -> tuple[Part, bytes]:
    """The part, and the digests of its chunks."""
    plain: list[Any] = [buffer.numpy() for buffer in buffers]
    return copy.seal_part(name, [plain])


def seal_in_helper(copy: Copy, name: str, buffers: Sequence[torch.Tensor]) -> tuple[Part, bytes]:
    """Stages the bytes in memory that only the two processes share, and hands over one key.

    The helper knows neither the vault's key, nor the checkpoint's, nor the rank's identity: this
    process computes the digests of what it staged, and signs them.
    """
    shut_out_debuggers()
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
    door = Door()
    process = subprocess.Popen(
        # -P: no module is taken from the working directory.
        [sys.executable, "-P", "-m", "sealring.vault.sealing_process", door.address],
        stdin=subprocess.DEVNULL,
        env=without_secrets(),
    )
    try:
        with door.accept(lambda pid: pid == process.pid, process.poll, _START_SECONDS) as here:
            here.settimeout(_START_SECONDS + size / _BYTES_A_SECOND)
            answer = _hand_over(here, place, name, size, files)
    except OSError as problem:
        raise WorkerFailed(
            f"the process that seals {name} ended before it had finished: {problem}"
        ) from problem
    finally:
        door.close()
        if process.poll() is None:
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
    if "error" in answer:
        raise OSError(answer["errno"], answer["error"])
    return str(answer["commitment"])


def _hand_over(here: socket.socket, place: Place, name: str, size: int, files: list[int]) -> Any:
    """What the helper answers: the commitment, or why the target could not be written."""
    order = {
        "suite": place.suite,
        "context": place.context(name).hex(),
        "part": name,
        "bytes": size,
    }
    text = json.dumps(order).encode()
    socket.send_fds(here, [len(text).to_bytes(4, "big")], files)
    here.sendall(text)
    here.sendall(memoryview(place.part_key(name)))
    answer = b""
    while piece := here.recv(4096):
        answer += piece
    if not answer:
        raise ConnectionError("it did not answer")
    return json.loads(answer)
