"""Files of shared memory without a name, which another process of this machine finds through /proc.

Being able to find one proves nothing, so a nonce that came over a sealed link must be in it; and
its size must be sealed, because a file that shrinks under a mapping kills the process that touches
it. What cannot be had is Unsupported.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import secrets
import stat
from dataclasses import dataclass
from typing import Final

from sealring.errors import Unsupported

NONCE_BYTES: Final = 32
SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
FUTURE_WRITE: Final = 0x10  # F_SEAL_FUTURE_WRITE (Linux 5.1) has no name in Python 3.11
_MFD_NOEXEC_SEAL: Final = 0x8  # Linux 6.3; no name in Python 3.11


@dataclass(frozen=True, slots=True)
class Shape:
    """What all files of one use have in common."""

    bytes: int
    nonce_at: int
    seals: int
    """Besides the last one, which seals the seals themselves, so that none is added after a check.
    """

    @property
    def all_seals(self) -> int:
        return self.seals | fcntl.F_SEAL_SEAL


def create(shape: Shape, name: str) -> tuple[int, bytes]:
    """A new file, not yet sealed, and the nonce that it holds."""
    try:
        fd = _memfd(name)
    except OSError as problem:
        raise Unsupported(f"memory cannot be made here: {problem.strerror}") from problem
    try:
        # Allocated now: a page that cannot be had later would kill the process too.
        os.posix_fallocate(fd, 0, shape.bytes)
        nonce = secrets.token_bytes(NONCE_BYTES)
        os.pwrite(fd, nonce, shape.nonce_at)
    except OSError as problem:
        os.close(fd)
        raise Unsupported(f"memory cannot be made here: {problem.strerror}") from problem
    return fd, nonce


def seal(fd: int, shape: Shape) -> None:
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, shape.all_seals)
    except OSError as problem:
        raise Unsupported(f"memory cannot be sealed here: {problem.strerror}") from problem


def find(pid: int, number: int, nonce: bytes, shape: Shape, *, writable: bool = False) -> int:
    """The peer's file, opened, if it is what it must be."""
    try:
        # O_PATH looks without opening: whatever lies there instead (a device, a FIFO) is not woken.
        found = os.open(f"/proc/{pid}/fd/{number}", os.O_PATH | os.O_CLOEXEC)
    except OSError as problem:
        raise Unsupported(
            f"the peer's memory is not on this machine: {problem.strerror}"
        ) from problem
    access = os.O_RDWR if writable else os.O_RDONLY
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            raise Unsupported("the peer's memory is no file")
        fd = os.open(f"/proc/self/fd/{found}", access | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as problem:
        raise Unsupported(f"the peer's memory cannot be opened: {problem.strerror}") from problem
    finally:
        os.close(found)
    try:
        _check(fd, nonce, shape)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check(fd: int, nonce: bytes, shape: Shape) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        # The size after the seals: from then on it cannot change.
        size = os.fstat(fd).st_size
        present = os.pread(fd, NONCE_BYTES, shape.nonce_at)
    except OSError as problem:
        raise Unsupported(f"the peer's memory cannot be checked: {problem.strerror}") from problem
    if seals & shape.all_seals != shape.all_seals:
        raise Unsupported("the peer's memory is not sealed against other writers and sizes")
    if size != shape.bytes:
        raise Unsupported(f"the peer's memory has {size} bytes and not {shape.bytes}")
    if not hmac.compare_digest(present, nonce):
        raise Unsupported("the peer's memory does not hold its nonce")


def _memfd(name: str) -> int:
    flags = os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError:  # an older kernel does not know the flag
        return os.memfd_create(name, flags)
