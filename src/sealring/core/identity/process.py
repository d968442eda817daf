"""A process that holds keys shows its memory to no other process of the same user.

Linux lets a user's processes read and write each other's memory and open each other's files
through /proc and ptrace, and writes a crashed process's memory to a core file. A process can
decline all of that (PR_SET_DUMPABLE). A worker does so before it reads a secret or a private key
and before it makes a group. This keeps out neither root nor a process with CAP_SYS_PTRACE, nor a
process that had opened the worker's memory before.

A child made by fork inherits this; a new program (exec) starts without it.

Secrets on disk are read here too, only where no other user can read them.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from sealring import _native
from sealring.core.settings import ALLOW_DEBUGGERS
from sealring.errors import ConfigurationError
from sealring.formats.files import check_size

_PR_SET_DUMPABLE: Final = 4


def shut_out_debuggers(environ: Mapping[str, str] | None = None) -> None:
    """Called before anything secret is in this process's memory."""
    if ALLOW_DEBUGGERS.read(os.environ if environ is None else environ):
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise ConfigurationError(
            f"this process's memory cannot be shut to debuggers ({reason}): allow prctl, or set "
            f"{ALLOW_DEBUGGERS.where} to true to train with memory that every process of this user "
            "can read"
        )


CREDENTIALS: Final = struct.Struct("3i")
"""Process, user and group, as SO_PEERCRED and SCM_CREDENTIALS have them."""


class PeerProcess(NamedTuple):
    pid: int
    uid: int


def peer_of(sock: socket.socket) -> PeerProcess:
    """For a connection to a listening socket: the process that called listen()."""
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, _ = CREDENTIALS.unpack(packed)
    return PeerProcess(pid, uid)


def read_private(path: Path, what: str, error: Callable[[str], ConfigurationError]) -> bytes:
    """The content of a file that only this user can read, or `error`.

    The checks are made on the opened file, not on its name, so it cannot be exchanged between the
    check and the read. O_NONBLOCK keeps a FIFO placed there from hanging the worker.
    """
    secret = read_secret_file(path, what, error)
    content = bytes(secret)
    secret.wipe()
    return content


def read_secret_file(
    path: Path, what: str, error: Callable[[str], ConfigurationError]
) -> _native.Secret:
    """Like `read_private`, without a copy that cannot be overwritten."""
    shut_out_debuggers()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as problem:
        raise error(f"{what} {path} cannot be read: {problem.strerror}") from problem
    try:
        _check_private(os.fstat(fd), path, what, error)
        size = os.fstat(fd).st_size
        check_size(size, path, what, error)
        content = _native.Secret.zeros(size)
        read = os.readv(fd, [content])
    except OSError as problem:
        raise error(f"{what} {path} cannot be read: {problem.strerror}") from problem
    finally:
        os.close(fd)
    return content.part(0, read)


def _check_private(
    status: os.stat_result, path: Path, what: str, error: Callable[[str], ConfigurationError]
) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise error(f"{what} {path} is not a regular file")
    if status.st_uid != os.geteuid():
        raise error(
            f"{what} {path} belongs to user {status.st_uid}, and this worker runs as user "
            f"{os.geteuid()}: run `chown {os.geteuid()} {path}`"
        )
    if status.st_mode & 0o077:
        raise error(
            f"{what} {path} can be used by others than its owner "
            f"(mode {stat.S_IMODE(status.st_mode):04o}): run `chmod 600 {path}`"
        )
