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

import os
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from sealring._native import LinkMemory
from sealring.core.handshake.messages import Message, digest
from sealring.core.links import files
from sealring.core.links.descriptors import Address, Inbox, close_received
from sealring.errors import MalformedSetup, Unsupported
from sealring.limits import RING_BYTES, RING_CONTROL_BYTES

MEMORY_BYTES: Final = RING_BYTES + RING_CONTROL_BYTES
_SHAPE: Final = files.Shape(MEMORY_BYTES, files.SIZE_SEALS | files.FUTURE_WRITE)
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
    fd = files.create(_SHAPE, "sealring-link")
    try:
        mapping = LinkMemory(fd, RING_BYTES, writable=True)
        files.seal(fd, _SHAPE)
        return mapping, fd
    except RuntimeError as problem:
        os.close(fd)
        raise Unsupported(f"memory cannot be made here: {problem}") from problem
    except BaseException:
        os.close(fd)
        raise


def open_memory(fd: int) -> LinkMemory:
    """Map a peer's memory, if it is what it must be; Unsupported if not. The file stays open."""
    files.check(fd, _SHAPE)
    try:
        return LinkMemory(fd, RING_BYTES, writable=False)
    except RuntimeError as problem:
        raise Unsupported(f"the peer's memory cannot be mapped: {problem}") from problem
