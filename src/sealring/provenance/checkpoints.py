"""A log's size and root, signed by the log and cosigned by witnesses (c2sp.org/tlog-checkpoint)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from sealring.errors import (
    ForgedNote,
    MalformedNote,
    NoQuorum,
    StaleCheckpoint,
    WrongLog,
)
from sealring.provenance.notes import (
    Note,
    Verifier,
    decode_base64,
    encode_base64,
    parse_note,
    verified,
)
from sealring.provenance.policy import LogPolicy
from sealring.provenance.tiles import HASH_BYTES

MAX_SIZE: Final = (1 << 63) - 1
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint says. Not proof of anything."""

    origin: str
    size: int
    root: bytes
    extensions: tuple[str, ...] = ()

    def encode(self) -> str:
        lines = [self.origin, str(self.size), encode_base64(self.root), *self.extensions]
        return "".join(f"{line}\n" for line in lines)


@dataclass(frozen=True, slots=True)
class SignedCheckpoint:
    """A checkpoint that passed a policy; `open_checkpoint` makes it."""

    checkpoint: Checkpoint
    note: Note
    cosigned: dict[Verifier, int]
    """The witnesses of the policy that cosigned it, and when."""

    @property
    def size(self) -> int:
        return self.checkpoint.size

    @property
    def root(self) -> bytes:
        return self.checkpoint.root


def parse_checkpoint(text: str) -> Checkpoint:
    lines = text[:-1].split("\n")
    if not text.endswith("\n") or len(lines) < 3 or not all(lines):
        raise MalformedNote("a checkpoint has three lines or more, and none of them is empty")
    origin, size, root, *extensions = lines
    digest = decode_base64(root, "the root of a checkpoint")
    if len(digest) != HASH_BYTES:
        raise MalformedNote(f"the root of a checkpoint has {HASH_BYTES} bytes")
    return Checkpoint(
        origin, parse_number(size, "the size of a checkpoint"), digest, tuple(extensions)
    )


def parse_number(text: str, what: str) -> int:
    """A decimal number without leading zeros, below 2^63."""
    if not _NUMBER.fullmatch(text) or int(text) > MAX_SIZE:
        raise MalformedNote(f"{what} is not a number from 0 to 2^63 - 1")
    return int(text)


def open_checkpoint(data: bytes, policy: LogPolicy, not_before: int = 0) -> SignedCheckpoint:
    """Checks the log's signature and the quorum of witnesses.

    Cosignatures older than `not_before` (seconds since 1970) do not count: that is how an old
    checkpoint that is shown again is told from a new one.
    """
    note = parse_note(data)
    checkpoint = parse_checkpoint(note.text)
    keys = policy.keys_of(checkpoint.origin)
    if not keys:
        raise WrongLog(
            f"the checkpoint is of the log {checkpoint.origin!r}, which is not one of those to "
            "believe"
        )
    if not verified(note, keys):
        raise ForgedNote(f"no key of the log {checkpoint.origin} signed the checkpoint")
    cosigned = verified(note, [witness.verifier for witness in policy.witnesses])
    if not policy.is_quorum(cosigned):
        names = ", ".join(sorted(key.name for key in cosigned)) or "none"
        raise NoQuorum(
            f"the checkpoint of {checkpoint.size} entries lacks a quorum of the policy's "
            f"witnesses; cosigned by: {names}"
        )
    fresh = {key: time for key, time in cosigned.items() if time >= not_before}
    if not policy.is_quorum(fresh):
        raise StaleCheckpoint(
            f"the checkpoint of {checkpoint.size} entries was cosigned before the time asked for: "
            "it may be an old one that is shown again"
        )
    return SignedCheckpoint(checkpoint, note, cosigned)
