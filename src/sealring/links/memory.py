"""A link's shared memory: each side makes its own part, and only reads the other's.

    | ring, RING_BYTES | control page |     one file from each side, written by its maker alone

The maker maps its file and then seals it against every further writer, so it may put records
together in it. The peer finds it through /proc (links/files.py). What cannot be had is Unsupported,
and the link then stays with TCP unless shared memory was demanded.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from sealring._native import LinkMemory
from sealring.errors import MalformedSetup, Unsupported
from sealring.handshake.messages import Message, digest, integer
from sealring.limits import RING_BYTES, RING_CONTROL_BYTES, RING_NONCE_OFFSET
from sealring.links import files

MEMORY_BYTES: Final = RING_BYTES + RING_CONTROL_BYTES
_SHAPE: Final = files.Shape(MEMORY_BYTES, RING_NONCE_OFFSET, files.SIZE_SEALS | files.FUTURE_WRITE)
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
    fd, nonce = files.create(_SHAPE, "sealring-link")
    try:
        mapping = LinkMemory(fd, RING_BYTES, writable=True)
        files.seal(fd, _SHAPE)
    except RuntimeError as problem:
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
    fd = files.find(offer.pid, offer.fd, bytes.fromhex(offer.nonce), _SHAPE)
    try:
        return LinkMemory(fd, RING_BYTES, writable=False)
    except RuntimeError as problem:
        raise Unsupported(f"the peer's memory cannot be mapped: {problem}") from problem
    finally:
        os.close(fd)
