"""Sealing a rank's part: in this process, or in a helper that gets the part's key alone."""

from __future__ import annotations

import json
import mmap
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import torch

from sealring import _native
from sealring.errors import VaultError, WorkerFailed
from sealring.identity.peer_process import peer_of
from sealring.identity.process import SETTING as ALLOW_DEBUGGERS
from sealring.identity.process import shut_out_debuggers
from sealring.vault.objects import Copy, Part, digest_of
from sealring.vault.sealed import Place

_START_SECONDS: Final = 120.0
"""For a helper to start, on a machine that is busy."""
_END_SECONDS: Final = 5.0
_BYTES_A_SECOND: Final = 1 << 20
"""A helper that seals more slowly than this does not work."""


def seal_here(copy: Copy, name: str, buffers: Sequence[torch.Tensor]) -> tuple[Part, bytes]:
    """The part, and the digests of its chunks."""
    file = copy.create_part(name)
    try:
        writer = copy.place.writer(file, name)
        plain: list[Any] = [buffer.numpy() for buffer in buffers]
        writer.write(plain)
        return copy.finish_part(file, name, writer), writer.digests
    finally:
        os.close(file)


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
        target = copy.create_part(name)
        try:
            commitment = _sealed_by_helper(copy.place, name, size, [memory, target])
            return Part(name, size, commitment, digest_of(digests)), digests
        finally:
            os.close(target)
    finally:
        os.close(memory)


def _sealed_by_helper(place: Place, name: str, size: int, files: list[int]) -> str:
    """The part's commitment. The helper starts with nothing secret, and shuts debuggers out first.

    Another process of this user could take over what a new process inherits. So the helper inherits
    no descriptor: it shuts such processes out first, then connects, and the kernel says which
    process has connected.
    """
    address = b"\0sealring-helper-" + secrets.token_hex(16).encode()
    deadline = time.monotonic() + _START_SECONDS
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as door:
        door.bind(address)
        door.listen(16)
        process = subprocess.Popen(
            # -P: no module is taken from the working directory.
            [sys.executable, "-P", "-m", "sealring.vault.sealing_process", address[1:].decode()],
            stdin=subprocess.DEVNULL,
            env=_without_secrets(),
        )
        try:
            with _connected(door, process, deadline) as here:
                here.settimeout(_START_SECONDS + size / _BYTES_A_SECOND)
                return _hand_over(here, place, name, size, files)
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


def _connected(
    door: socket.socket, process: subprocess.Popen[bytes], deadline: float
) -> socket.socket:
    """The helper's own connection; those of other processes are closed."""
    door.settimeout(0.1)
    while time.monotonic() < deadline:
        try:
            here, _ = door.accept()
        except TimeoutError:
            if process.poll() is not None:
                raise ConnectionError(f"it ended with status {process.returncode}") from None
            continue
        if peer_of(here).pid == process.pid:
            return here
        here.close()
    raise TimeoutError(f"it did not connect within {_START_SECONDS:.0f} seconds")


def _without_secrets() -> dict[str, str]:
    """The environment may hold the job's secret, and names files that hold keys."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SEALRING_") or name == ALLOW_DEBUGGERS
    }


def _hand_over(here: socket.socket, place: Place, name: str, size: int, files: list[int]) -> str:
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
    document = json.loads(answer)
    if "error" in document:
        raise VaultError(f"{name} could not be sealed: {document['error']}")
    return str(document["commitment"])
