"""A link's shared memory: each side makes its own part, and only reads the other's.

    | ring, RING_BYTES | control page |     one file from each side, written by its maker alone

The maker maps its file and then seals it against every further writer, so it may put records
together in it. The file has no name; the peer finds it through /proc. Being able to find it proves
nothing, so a nonce that came over TLS must be in it; and its size must be sealed, because a file
that shrinks under a mapping kills the process that touches it. What cannot be had is Unsupported,
and the link then stays with TCP unless shared memory was demanded.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import secrets
import stat
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from sealring._native import LinkMemory
from sealring.errors import MalformedSetup, Unsupported
from sealring.handshake.messages import Message, digest, integer
from sealring.limits import RING_BYTES, RING_CONTROL_BYTES, RING_NONCE_OFFSET

MEMORY_BYTES: Final = RING_BYTES + RING_CONTROL_BYTES

_NONCE_BYTES: Final = 32
_SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_FUTURE_WRITE: Final = 0x10  # F_SEAL_FUTURE_WRITE (Linux 5.1) has no name in Python 3.11
# The last one seals the seals themselves, so that none is added after the check.
_SEALS: Final = _SIZE_SEALS | _FUTURE_WRITE | fcntl.F_SEAL_SEAL
_MFD_NOEXEC_SEAL: Final = 0x8  # Linux 6.3; no name in Python 3.11
_FIELDS: Final = frozenset({"pid", "fd", "nonce", "bytes"})


class SharedMemory(NamedTuple):
    """Both sides' memory, mapped: our own to write, the peer's to read."""

    own: LinkMemory
    theirs: LinkMemory


@dataclass(frozen=True, slots=True)
class Offer:
    pid: int
    fd: int
    nonce: str
    bytes: int

    def message(self) -> dict[str, Any]:
        return {"pid": self.pid, "fd": self.fd, "nonce": self.nonce, "bytes": self.bytes}


def parse_offer(value: object) -> Offer:
    if type(value) is not dict or value.keys() != _FIELDS:
        raise MalformedSetup("an offer of shared memory has not the fields it must have")
    offer: Message = value
    return Offer(
        pid=integer(offer, "pid", 1, 1 << 30),
        fd=integer(offer, "fd", 0, 1 << 30),
        nonce=digest(offer, "nonce"),
        bytes=integer(offer, "bytes", 1),
    )


@dataclass(frozen=True, slots=True)
class OwnMemory:
    """Our part, until the peer has opened it: then the file may be closed, the mapping stays."""

    mapping: LinkMemory = field(repr=False)
    offer: Offer

    def close(self) -> None:
        os.close(self.offer.fd)


def create_memory() -> OwnMemory:
    """New memory with a nonce in it; Unsupported if this machine has none to give."""
    try:
        fd = _memfd()
    except OSError as problem:
        raise Unsupported(f"memory cannot be made here: {problem.strerror}") from problem
    try:
        # Allocated now: a page that cannot be had later would kill the process too.
        os.posix_fallocate(fd, 0, MEMORY_BYTES)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        os.pwrite(fd, nonce, RING_NONCE_OFFSET)
        mapping = LinkMemory(fd, RING_BYTES, writable=True)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except (OSError, RuntimeError) as problem:
        os.close(fd)
        raise Unsupported(f"memory cannot be made here: {problem}") from problem
    except BaseException:
        os.close(fd)
        raise
    return OwnMemory(mapping, Offer(os.getpid(), fd, nonce.hex(), MEMORY_BYTES))


def open_memory(offer: Offer) -> LinkMemory:
    """Map the memory that a peer offers, if it is what it must be; Unsupported if not."""
    if offer.bytes != MEMORY_BYTES:
        raise Unsupported(f"the peer's memory has {offer.bytes} bytes and ours {MEMORY_BYTES}")
    try:
        # O_PATH looks without opening: whatever lies there instead (a device, a FIFO) is not woken.
        found = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", os.O_PATH | os.O_CLOEXEC)
    except OSError as problem:
        raise Unsupported(
            f"the peer's memory is not on this machine: {problem.strerror}"
        ) from problem
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            raise Unsupported("the peer's memory is no file")
        fd = os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as problem:
        raise Unsupported(f"the peer's memory cannot be opened: {problem.strerror}") from problem
    finally:
        os.close(found)
    try:
        _check(fd, bytes.fromhex(offer.nonce))
        return LinkMemory(fd, RING_BYTES, writable=False)
    except RuntimeError as problem:
        raise Unsupported(f"the peer's memory cannot be mapped: {problem}") from problem
    finally:
        os.close(fd)


def _check(fd: int, nonce: bytes) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        # The size after the seals: from then on it cannot change.
        size = os.fstat(fd).st_size
        present = os.pread(fd, _NONCE_BYTES, RING_NONCE_OFFSET)
    except OSError as problem:
        raise Unsupported(f"the peer's memory cannot be checked: {problem.strerror}") from problem
    if seals & _SEALS != _SEALS:
        raise Unsupported("the peer's memory is not sealed against other writers and sizes")
    if size != MEMORY_BYTES:
        raise Unsupported(f"the peer's memory has {size} bytes and not {MEMORY_BYTES}")
    if not hmac.compare_digest(present, nonce):
        raise Unsupported("the peer's memory does not hold its nonce")


def _memfd() -> int:
    flags = os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC
    try:
        return os.memfd_create("sealring-link", flags | _MFD_NOEXEC_SEAL)
    except OSError:  # an older kernel does not know the flag
        return os.memfd_create("sealring-link", flags)
