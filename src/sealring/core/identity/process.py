"""Hides the memory of a process that holds keys from other processes of the same user.

Linux lets a user's processes read and write each other's memory and open each other's files through
/proc and ptrace, and writes a crashed process's memory to a core file. A process can forbid all of
this (PR_SET_DUMPABLE). A worker does so before it reads a secret or a private key and before it
makes a group. It does not keep out root, a process with CAP_SYS_PTRACE, or a process that had
opened the worker's memory before.

A forked child inherits the setting; a new program (exec) starts without it.

This module also reads files with secrets, and refuses files that other users can read.
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
    """Hides this process's memory. Call it before anything secret is in that memory."""
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
"""The struct of SO_PEERCRED and SCM_CREDENTIALS: process, user and group."""


class PeerProcess(NamedTuple):
    pid: int
    uid: int


def peer_of(sock: socket.socket) -> PeerProcess:
    """The process at the other end of a Unix socket.

    For a connection to a listening socket, this is the process that called listen().
    """
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, _ = CREDENTIALS.unpack(packed)
    return PeerProcess(pid, uid)


def read_private(path: Path, what: str, error: Callable[[str], ConfigurationError]) -> bytes:
    """Returns the content of a file that only this user can read; else raises `error`.

    The checks are made on the opened file, not on its name, so it cannot be exchanged between check
    and read. With O_NONBLOCK, a FIFO in the file's place does not hang the worker.
    """
    secret = read_secret_file(path, what, error)
    content = bytes(secret)
    secret.wipe()
    return content


def read_secret_file(
    path: Path, what: str, error: Callable[[str], ConfigurationError]
) -> _native.Secret:
    """Like `read_private`, but leaves no copy in memory that cannot be overwritten."""
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
