"""The directory of the workers' sockets, closed to other users, and questions to the workers.

The directory is opened once and checked on the open descriptor. Sockets in it are reached through
that descriptor (/proc/self/fd/N/NAME), so the directory cannot be exchanged after the check, and
its path may be longer than the 107 bytes that the address of a Unix socket holds. All workers are
asked at once, for a bounded time each.
"""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Generic

from sealring.core.identity.process import peer_of
from sealring.core.settings import LIVE
from sealring.errors import ConfigurationError
from sealring.observe.status import MOST_BYTES, Answer, SocketStatus, WorkerStatus, decode

OFF: Final = "0"
SUFFIX: Final = ".sock"
MOST_SOCKETS: Final = 4096
"""Names that are read from one directory."""


def chosen_directory(environ: Mapping[str, str], user: int | None = None) -> Path | None:
    """Where the workers of a user (default: this one) have their sockets; None if switched off.

    Not in $TMPDIR or $XDG_RUNTIME_DIR: a scheduler's job and the login shell beside it differ in
    these, and the second is deleted when the user logs out.
    """
    setting = LIVE.read(environ)
    if setting == OFF:
        return None
    if not setting:
        return Path(f"/tmp/sealring-{os.geteuid() if user is None else user}")  # noqa: S108
    return Path(setting)


class PrivateDirectory:
    """An open directory that belongs to `user`, and that no other user may enter."""

    def __init__(self, path: Path, *, user: int | None = None, create: bool = False) -> None:
        """Raises ConfigurationError, or FileNotFoundError where it is not created."""
        self.path = path
        self.user = os.geteuid() if user is None else user
        try:
            if create:
                _make(path)
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError as problem:
            raise ConfigurationError(
                f"{path}, the directory of workers' sockets, cannot be used: {problem.strerror}. "
                f"Set {LIVE.name} to another one"
            ) from problem
        try:
            self._check(os.fstat(self.fd))
        except BaseException:
            os.close(self.fd)
            raise

    def _check(self, status: os.stat_result) -> None:
        if status.st_uid != self.user:
            raise ConfigurationError(
                f"{self.path}, the directory of workers' sockets, belongs to user {status.st_uid} "
                f"and not to user {self.user}: set {LIVE.name} to a directory of your own"
            )
        if status.st_mode & 0o077:
            raise ConfigurationError(
                f"{self.path}, the directory of workers' sockets, is open to other users (mode "
                f"{stat.S_IMODE(status.st_mode):04o}): run `chmod 700 {self.path}`"
            )

    def address(self, name: str) -> str:
        """Of a socket in the directory, for bind and connect."""
        return f"/proc/self/fd/{self.fd}/{name}"

    def sockets(self) -> list[str]:
        names: list[str] = []
        with os.scandir(self.fd) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
                    names.append(entry.name)
                if len(names) == MOST_SOCKETS:
                    break
        return sorted(names)

    def remove(self, name: str) -> None:
        os.unlink(name, dir_fd=self.fd)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def close(self) -> None:
        os.close(self.fd)


def _make(path: Path) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    except FileNotFoundError as problem:
        raise ConfigurationError(
            f"{path}, the directory of workers' sockets, cannot be made: {path.parent} does not "
            "exist"
        ) from problem


# ---- questions to all workers of a directory


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
