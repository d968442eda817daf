"""Asks the workers of a directory, all at once, for a bounded time each."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Generic

from sealring.core.identity.peer_process import peer_of
from sealring.errors import ConfigurationError
from sealring.observe.directory import PrivateDirectory
from sealring.observe.status import MOST_BYTES, Answer, SocketStatus, WorkerStatus, decode

SECONDS: Final = 3.0
_AT_ONCE: Final = 16
_KINDS: Final = {WorkerStatus: "status", SocketStatus: "sockets"}


@dataclass(slots=True)
class Reading(Generic[Answer]):
    answers: list[Answer] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    """Sockets of workers that ended without removing them."""
    silent: dict[str, str] = field(default_factory=dict)
    """Sockets whose worker gave no answer, and why."""


def read_all(
    wanted: type[Answer],
    path: Path,
    *,
    user: int | None = None,
    only: Callable[[str], bool] = lambda name: True,
) -> Reading[Answer]:
    """The answers of all workers whose socket is there; none where there is no directory."""
    reading: Reading[Answer] = Reading()
    try:
        directory = PrivateDirectory(path, user=user)
    except FileNotFoundError:
        return reading

    def add(name: str) -> None:
        try:
            reading.answers.append(ask(wanted, directory, name))
        except (ConnectionRefusedError, FileNotFoundError):  # no listener, or it has just ended
            reading.stale.append(name)
        except (OSError, ConfigurationError) as problem:
            reading.silent[name] = str(problem)

    with closing(directory), ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(add, filter(only, directory.sockets())))
    return reading


def ask(wanted: type[Answer], directory: PrivateDirectory, name: str) -> Answer:
    deadline = time.monotonic() + SECONDS
    kind = _KINDS[wanted]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        _connect(sock, directory.address(name), deadline)
        worker = peer_of(sock)
        if worker.uid != directory.user:
            raise ConfigurationError(f"{name} is a socket of user {worker.uid}")
        sock.sendall(f"{kind}\n".encode())
        line = _read_line(sock, deadline)
    return decode(wanted, kind, line, f"the worker at {name}")


def _connect(sock: socket.socket, address: str, deadline: float) -> None:
    while True:
        sock.settimeout(_left(deadline))
        try:
            sock.connect(address)
            return
        except BlockingIOError:  # other readers wait there already
            time.sleep(0.02)


def _read_line(sock: socket.socket, deadline: float) -> bytes:
    parts: list[bytes] = []
    size = 0
    while not (parts and parts[-1].endswith(b"\n")):
        sock.settimeout(_left(deadline))
        part = sock.recv(1 << 16)
        if not part:
            raise ConfigurationError("the worker closed the connection without an answer")
        parts.append(part)
        size += len(part)
        if size > MOST_BYTES:
            raise ConfigurationError(f"the worker's answer is longer than {MOST_BYTES} bytes")
    return b"".join(parts)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"no answer within {SECONDS:.0f} s")
    return left


def pid_of(name: str) -> int:
    """The process that a socket's name states; 0 if it states none."""
    digits = os.path.basename(name).partition("-")[0]
    return int(digits) if digits.isdecimal() else 0
