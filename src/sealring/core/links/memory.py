"""A link's shared memory: each side makes its own part, and only reads the other's.

    | ring, RING_BYTES | control page |     one file from each side

The maker maps its file and then seals it against every further writer. No record is sealed or
opened in it all the same: sealed records are copied into it and out of it
(native/transport/pipe.hpp), so a process that did get to write there can destroy records, and
cannot change one unseen.

The files travel as descriptors (links/descriptors.py), each into an inbox of the other side. What
does not serve is Unsupported, and the link then stays with TCP unless shared memory was demanded.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from sealring._native import LinkMemory
from sealring.core.handshake.messages import Message, digest
from sealring.core.links.descriptors import Address, Inbox, close_received
from sealring.errors import MalformedSetup, Unsupported
from sealring.limits import RING_BYTES, RING_CONTROL_BYTES

# ---- files of shared memory without a name, which travel between processes as descriptors
# A file that shrinks under a mapping kills the process that touches it, so the size of each is
# sealed, and a file that came from another process is checked before it is mapped. What does not
# serve is Unsupported.

SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
FUTURE_WRITE: Final = 0x10  # F_SEAL_FUTURE_WRITE (Linux 5.1) has no name in Python 3.11
_BLOCK_BYTES: Final = 512  # of st_blocks, whatever the file system's own blocks are
_MFD_NOEXEC_SEAL: Final = 0x8  # Linux 6.3; no name in Python 3.11


@dataclass(frozen=True, slots=True)
class FileShape:
    """What all files of one use have in common."""

    bytes: int
    seals: int
    """Besides the last one, which seals the seals themselves, so that none is added after a check.
    """

    @property
    def all_seals(self) -> int:
        return self.seals | fcntl.F_SEAL_SEAL


def create_memory_file(shape: FileShape, name: str) -> int:
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


def seal_file(fd: int, shape: FileShape) -> None:
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, shape.all_seals)
    except OSError as problem:
        raise Unsupported(f"memory cannot be sealed here: {problem.strerror}") from problem


def check_file(fd: int, shape: FileShape) -> None:
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


# ---- a link's memory

MEMORY_BYTES: Final = RING_BYTES + RING_CONTROL_BYTES
_SHAPE: Final = FileShape(MEMORY_BYTES, SIZE_SEALS | FUTURE_WRITE)
_FIELDS: Final = frozenset({"socket", "token"})


class SharedMemory(NamedTuple):
    """Both sides' memory, mapped: our own to write, the peer's to read."""

    own: LinkMemory
    theirs: LinkMemory


def offer_of(address: Address) -> dict[str, Any]:
    """The message that says where the peer may leave its memory."""
    return {"socket": address.name.hex(), "token": address.token.hex()}


def parse_offer(value: object) -> Address:
    if type(value) is not dict or value.keys() != _FIELDS:
        raise MalformedSetup("an offer of shared memory has not the fields it must have")
    offer: Message = value
    return Address(bytes.fromhex(digest(offer, "socket")), bytes.fromhex(digest(offer, "token")))


@dataclass(frozen=True, slots=True)
class OwnMemory:
    """Our part, and the inbox for the peer's. After the exchange only the mapping is needed."""

    mapping: LinkMemory = field(repr=False)
    fd: int
    inbox: Inbox

    def close(self) -> None:
        os.close(self.fd)
        self.inbox.close()

    def take_peers(self) -> LinkMemory:
        """Map the memory that the peer left, if it is what it must be; Unsupported if not."""
        left = self.inbox.take()
        try:
            if 0 not in left:
                raise Unsupported("the peer's memory did not come")
            return open_memory(left[0][0])
        finally:
            close_received(fd for each in left.values() for fd in each)


def create_memory() -> OwnMemory:
    """New memory and an inbox; Unsupported if this machine has none to give."""
    mapping, fd = create_file()
    try:
        return OwnMemory(mapping, fd, Inbox())
    except BaseException:
        os.close(fd)
        raise


def create_file() -> tuple[LinkMemory, int]:
    """New memory, mapped, and its file for the peer; Unsupported if there is none."""
    fd = create_memory_file(_SHAPE, "sealring-link")
    try:
        mapping = LinkMemory(fd, RING_BYTES, writable=True)
        seal_file(fd, _SHAPE)
        return mapping, fd
    except RuntimeError as problem:
        os.close(fd)
        raise Unsupported(f"memory cannot be made here: {problem}") from problem
    except BaseException:
        os.close(fd)
        raise


def open_memory(fd: int) -> LinkMemory:
    """Map a peer's memory, if it is what it must be; Unsupported if not. The file stays open."""
    check_file(fd, _SHAPE)
    try:
        return LinkMemory(fd, RING_BYTES, writable=False)
    except RuntimeError as problem:
        raise Unsupported(f"the peer's memory cannot be mapped: {problem}") from problem
