"""Files of shared memory without a name, which travel between processes as descriptors.

A file that shrinks under a mapping kills the process that touches it, so the size of each is
sealed, and a file that came from another process is checked before it is mapped. What does not
serve is Unsupported.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from typing import Final

from sealring.errors import Unsupported

SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
FUTURE_WRITE: Final = 0x10  # F_SEAL_FUTURE_WRITE (Linux 5.1) has no name in Python 3.11
_BLOCK_BYTES: Final = 512  # of st_blocks, whatever the file system's own blocks are
_MFD_NOEXEC_SEAL: Final = 0x8  # Linux 6.3; no name in Python 3.11


@dataclass(frozen=True, slots=True)
class Shape:
    """What all files of one use have in common."""

    bytes: int
    seals: int
    """Besides the last one, which seals the seals themselves, so that none is added after a check.
    """

    @property
    def all_seals(self) -> int:
        return self.seals | fcntl.F_SEAL_SEAL


def create(shape: Shape, name: str) -> int:
    """A new file, not yet sealed."""
    try:
        fd = _memfd(name)
    except OSError as problem:
        raise Unsupported(f"memory cannot be made here: {problem.strerror}") from problem
    try:
        # Allocated now: a page that is not available later would kill the process too.
        os.posix_fallocate(fd, 0, shape.bytes)
    except OSError as problem:
        os.close(fd)
        raise Unsupported(f"memory cannot be made here: {problem.strerror}") from problem
    return fd


def seal(fd: int, shape: Shape) -> None:
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, shape.all_seals)
    except OSError as problem:
        raise Unsupported(f"memory cannot be sealed here: {problem.strerror}") from problem


def check(fd: int, shape: Shape) -> None:
    """Whether a file that came from a peer is what it must be; nothing of it is read."""
    try:
        # First of all: of a file that is no memory, a file system may be asked that never answers.
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        # The size after the seals: from then on it cannot change.
        status = os.fstat(fd)
    except OSError as problem:
        raise Unsupported(f"the peer's memory cannot be checked: {problem.strerror}") from problem
    if seals & shape.all_seals != shape.all_seals:
        raise Unsupported("the peer's memory is not sealed against other writers and sizes")
    if status.st_size != shape.bytes:
        raise Unsupported(f"the peer's memory has {status.st_size} bytes and not {shape.bytes}")
    if status.st_blocks * _BLOCK_BYTES < shape.bytes:
        # The pages that are missing would be this process's to find, when it reads.
        raise Unsupported("the peer's memory is not allocated")


def _memfd(name: str) -> int:
    flags = os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError:  # an older kernel does not know the flag
        return os.memfd_create(name, flags)
