"""The texts of a log: checkpoints, proofs, and submissions to witnesses.

A checkpoint is a log's size and root, signed by the log and cosigned by witnesses
(c2sp.org/tlog-checkpoint). A proof is one text file that proves an entry offline
(c2sp.org/tlog-proof). A submission asks a witness for its cosignature (c2sp.org/tlog-witness):

old <size>
<hash>...            a consistency proof, one hash a line
<empty line>
<checkpoint>
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final

from sealring.errors import (
    ForgedStatement,
    LogError,
)
from sealring.formats.log import tree
from sealring.formats.log.notes import (
    MAX_NOTE_BYTES,
    Note,
    Verifier,
    malformed_note,
    parse_note,
    verified,
)
from sealring.formats.log.policy import LogPolicy
from sealring.formats.log.tree import HASH_BYTES
from sealring.formats.strict import decode_base64, encode_base64

MAX_SIZE: Final = (1 << 63) - 1
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)
MAX_PROOF_BYTES: Final = MAX_NOTE_BYTES + (1 << 17)
_PROOF: Final = "c2sp.org/tlog-proof@v1"
PATH: Final = "/add-checkpoint"
SIZE_TYPE: Final = "text/x.tlog.size"
MAX_SUBMISSION_BYTES: Final = MAX_NOTE_BYTES + (8 << 10)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a checkpoint. It proves nothing."""

    origin: str
    size: int
    root: bytes
    extensions: tuple[str, ...] = ()

    def encode(self) -> str:
        lines = [self.origin, str(self.size), encode_base64(self.root), *self.extensions]
        return "".join(f"{line}\n" for line in lines)


@dataclass(frozen=True, slots=True)
class SignedCheckpoint:
    """A checkpoint that passed a policy. `open_checkpoint` makes it."""

    checkpoint: Checkpoint
    note: Note
    cosigned: dict[Verifier, int]
    """The witnesses of the policy that cosigned it, and the time of each."""

    @property
    def witnesses(self) -> list[str]:
        """The names of the witnesses that cosigned."""
        return sorted(key.name for key in self.cosigned)

    @property
    def origin(self) -> str:
        return self.checkpoint.origin

    @property
    def size(self) -> int:
        return self.checkpoint.size

    @property
    def root(self) -> bytes:
        return self.checkpoint.root


def parse_checkpoint(text: str) -> Checkpoint:
    lines = text[:-1].split("\n")
    if not text.endswith("\n") or len(lines) < 3 or not all(lines):
        raise malformed_note("a checkpoint has three lines or more, and none of them is empty")
    origin, size, root, *extensions = lines
    digest = decode_base64(root, "the root of a checkpoint", malformed_note)
    if len(digest) != HASH_BYTES:
        raise malformed_note(f"the root of a checkpoint has {HASH_BYTES} bytes")
    return Checkpoint(
        origin, parse_number(size, "the size of a checkpoint"), digest, tuple(extensions)
    )


def parse_number(text: str, what: str) -> int:
    """A decimal number without leading zeros, below 2^63."""
    if not _NUMBER.fullmatch(text) or int(text) > MAX_SIZE:
        raise malformed_note(f"{what} is not a number from 0 to 2^63 - 1")
    return int(text)


def open_checkpoint(data: bytes, policy: LogPolicy, not_before: int = 0) -> SignedCheckpoint:
    """Checks the log's signature and the quorum of witnesses.

    Cosignatures older than `not_before` (seconds since 1970) do not count. So an old checkpoint
    that is shown again is not taken for a new one.
    """
    note = parse_note(data)
    checkpoint = parse_checkpoint(note.text)
    keys = policy.keys_of(checkpoint.origin)
    if not keys:
        raise ForgedStatement(
            f"the checkpoint is of the log {checkpoint.origin!r}, which is not one of those to "
            "believe",
            code="log.wrong",
        )
    if not verified(note, keys):
        raise ForgedStatement(
            f"no key of the log {checkpoint.origin} signed the checkpoint", code="log.forged_note"
        )
    cosigned = verified(note, [witness.verifier for witness in policy.witnesses])
    if not policy.is_quorum(cosigned):
        names = ", ".join(sorted(key.name for key in cosigned)) or "none"
        raise LogError(
            f"the checkpoint of {checkpoint.size} entries lacks a quorum of the policy's "
            f"witnesses; cosigned by: {names}",
            code="log.no_quorum",
        )
    fresh = {key: time for key, time in cosigned.items() if time >= not_before}
    if not policy.is_quorum(fresh):
        raise LogError(
            f"the checkpoint of {checkpoint.size} entries was cosigned before the time asked for: "
            "it may be an old one that is shown again",
            code="log.stale_checkpoint",
        )
    return SignedCheckpoint(checkpoint, note, cosigned)


# ---- proofs


@dataclass(frozen=True, slots=True)
class LogProof:
    """A proof as read. Nothing in it is checked yet."""

    index: int
    hashes: tuple[bytes, ...]
    checkpoint: bytes
    extra: bytes | None = None
    """Opaque data that the proof does not authenticate."""

    def encode(self) -> bytes:
        lines = [_PROOF]
        if self.extra:
            lines.append(f"extra {encode_base64(self.extra)}")
        lines += [f"index {self.index}", *(encode_base64(each) for each in self.hashes), ""]
        return "".join(f"{line}\n" for line in lines).encode() + self.checkpoint


def parse_proof(data: bytes) -> LogProof:
    if len(data) > MAX_PROOF_BYTES:
        raise malformed_note(f"a proof has at most {MAX_PROOF_BYTES} bytes")
    head, empty, checkpoint = data.partition(b"\n\n")
    try:
        lines = head.decode("ascii").split("\n")
    except UnicodeDecodeError:
        raise malformed_note("the lines of a proof before its checkpoint are ASCII") from None
    if not empty or lines[0] != _PROOF:
        raise malformed_note(f"a proof begins with {_PROOF}, and has a checkpoint at its end")
    lines = lines[1:]
    extra = None
    if lines and lines[0].startswith("extra "):
        extra = decode_base64(
            lines[0].removeprefix("extra "), "the extra data of a proof", malformed_note
        )
        lines = lines[1:]
    if not lines or not lines[0].startswith("index "):
        raise malformed_note("a proof has an index line before its hashes")
    index = parse_number(lines[0].removeprefix("index "), "the index of a proof")
    return LogProof(index, parse_hashes(lines[1:]), checkpoint, extra)


def parse_hashes(lines: list[str]) -> tuple[bytes, ...]:
    """The hashes of an inclusion or consistency proof, one on each line."""
    if len(lines) > tree.MAX_PROOF:
        raise malformed_note(f"a proof has at most {tree.MAX_PROOF} hashes")
    hashes = tuple(decode_base64(line, "a hash of a proof", malformed_note) for line in lines)
    if any(len(each) != HASH_BYTES for each in hashes):
        raise malformed_note(f"a hash of a proof has {HASH_BYTES} bytes")
    return hashes


def check_proof(
    proof: LogProof, entry: bytes, policy: LogPolicy, not_before: int = 0
) -> SignedCheckpoint:
    """Checks that an entry is in a log of the policy, up to a checkpoint that its quorum signed."""
    signed = open_checkpoint(proof.checkpoint, policy, not_before)
    tree.check_inclusion(proof.index, signed.size, tree.leaf_hash(entry), proof.hashes, signed.root)
    return signed


# ---- submissions to witnesses


@dataclass(frozen=True, slots=True)
class Submission:
    old: int
    """The size that the witness is expected to have cosigned last."""
    proof: tuple[bytes, ...]
    checkpoint: bytes

    def encode(self) -> bytes:
        lines = [f"old {self.old}", *(encode_base64(each) for each in self.proof), ""]
        return "".join(f"{line}\n" for line in lines).encode() + self.checkpoint


def parse_submission(data: bytes) -> Submission:
    head, empty, checkpoint = data.partition(b"\n\n")
    try:
        lines = head.decode("ascii").split("\n")
    except UnicodeDecodeError:
        raise malformed_note("the lines before the checkpoint are ASCII") from None
    if not empty or not lines[0].startswith("old "):
        raise malformed_note("a submission begins with `old SIZE`, and has a checkpoint at its end")
    old = parse_number(lines[0].removeprefix("old "), "the old size")
    return Submission(old, parse_hashes(lines[1:]), checkpoint)


def origin_digest(origin: str) -> str:
    """Identifies a log where its name, which may be any text, cannot be used."""
    return hashlib.sha256(origin.encode()).hexdigest()


def seen_path(origin: str) -> str:
    """The path at which a witness shows the last checkpoint of a log that it cosigned."""
    return f"/{origin_digest(origin)}/checkpoint"
