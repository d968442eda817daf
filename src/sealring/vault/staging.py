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

from sealring.errors import VaultError, WorkerFailed
from sealring.identity.process import SETTING as ALLOW_DEBUGGERS
from sealring.vault.objects import Copy, Part
from sealring.vault.sealed import Place

_GROUP_BYTES: Final = 32 << 20
"""Tensors are sealed in groups of about this size: enough for all threads."""


def seal_here(copy: Copy, name: str, buffers: Sequence[torch.Tensor]) -> Part:
    file = copy.create_part(name)
    try:
        writer = copy.place.writer(file, name)
        group: list[Any] = []
        size = 0
        for buffer in buffers:
            group.append(buffer.numpy())
            size += buffer.numel()
            if size >= _GROUP_BYTES:
                writer.write(group)
                group, size = [], 0
        writer.write(group)
        return copy.finish_part(file, name, writer)
    finally:
        os.close(file)


def seal_in_helper(copy: Copy, name: str, buffers: Sequence[torch.Tensor]) -> Part:
    """Stages the bytes in memory that only the two processes share, and hands over one key.

    The key travels once, through a socket pair that no other process can open. The helper knows
    neither the vault's key nor the rank's identity: this process signs what comes back.
    """
    size = sum(buffer.numel() for buffer in buffers)
    memory = os.memfd_create("sealring-staging", os.MFD_CLOEXEC)
    target = copy.create_part(name)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.ftruncate(memory, max(1, size))
        with mmap.mmap(memory, max(1, size)) as staged:
            at = 0
            for buffer in buffers:
                plain: Any = buffer.numpy()
                staged[at : at + buffer.numel()] = memoryview(plain)
                at += buffer.numel()
        with (
            here,
            subprocess.Popen(
                [sys.executable, "-m", "sealring.vault.helper", str(there.fileno())],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                env=_without_secrets(),
            ) as process,
        ):
            there.close()
            try:
                return _hand_over(here, copy.place, name, size, [memory, target])
            except OSError as problem:
                raise WorkerFailed(
                    f"the process that seals {name} ended before it had finished: {problem}"
                ) from problem
            finally:
                here.close()
                process.wait()
    finally:
        there.close()
        os.close(memory)
        os.close(target)


def _without_secrets() -> dict[str, str]:
    """The environment may hold the job's secret, and names files that hold keys."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SEALRING_") or name == ALLOW_DEBUGGERS
    }


def _hand_over(here: socket.socket, place: Place, name: str, size: int, files: list[int]) -> Part:
    order = {
        "suite": place.suite,
        "context": place.context(name).hex(),
        "part": name,
        "bytes": size,
    }
    text = json.dumps(order).encode()
    socket.send_fds(here, [len(text).to_bytes(4, "big")], files)
    here.sendall(text)
    here.sendall(memoryview(place.key))
    answer = b""
    while piece := here.recv(4096):
        answer += piece
    if not answer:
        raise ConnectionError("it did not answer")
    document = json.loads(answer)
    if "error" in document:
        raise VaultError(f"{name} could not be sealed: {document['error']}")
    return Part(name, size, document["commitment"])
