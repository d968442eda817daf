"""One text file that proves an entry of a log, offline (c2sp.org/tlog-proof)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sealring.errors import MalformedNote
from sealring.provenance import tree
from sealring.provenance.checkpoints import SignedCheckpoint, open_checkpoint, parse_number
from sealring.provenance.notes import MAX_NOTE_BYTES, decode_base64, encode_base64
from sealring.provenance.policy import LogPolicy
from sealring.provenance.tiles import HASH_BYTES

MAX_PROOF_BYTES: Final = MAX_NOTE_BYTES + (1 << 17)
_FIRST: Final = "c2sp.org/tlog-proof@v1"


@dataclass(frozen=True, slots=True)
class LogProof:
    """As it was read. Nothing of it has been checked."""

    index: int
    hashes: tuple[bytes, ...]
    checkpoint: bytes
    extra: bytes | None = None
    """Opaque, and not authenticated by the proof."""

    def encode(self) -> bytes:
        lines = [_FIRST]
        if self.extra:
            lines.append(f"extra {encode_base64(self.extra)}")
        lines += [f"index {self.index}", *(encode_base64(each) for each in self.hashes), ""]
        return "".join(f"{line}\n" for line in lines).encode() + self.checkpoint


def parse_proof(data: bytes) -> LogProof:
    if len(data) > MAX_PROOF_BYTES:
        raise MalformedNote(f"a proof has at most {MAX_PROOF_BYTES} bytes")
    head, empty, checkpoint = data.partition(b"\n\n")
    try:
        lines = head.decode("ascii").split("\n")
    except UnicodeDecodeError:
        raise MalformedNote("the lines of a proof before its checkpoint are ASCII") from None
    if not empty or lines[0] != _FIRST:
        raise MalformedNote(f"a proof begins with {_FIRST}, and has a checkpoint at its end")
    lines = lines[1:]
    extra = None
    if lines and lines[0].startswith("extra "):
        extra = decode_base64(lines[0].removeprefix("extra "), "the extra data of a proof")
        lines = lines[1:]
    if not lines or not lines[0].startswith("index "):
        raise MalformedNote("a proof has an index line before its hashes")
    index = parse_number(lines[0].removeprefix("index "), "the index of a proof")
    return LogProof(index, parse_hashes(lines[1:]), checkpoint, extra)


def parse_hashes(lines: list[str]) -> tuple[bytes, ...]:
    """The lines of an inclusion or consistency proof."""
    if len(lines) > tree.MAX_PROOF:
        raise MalformedNote(f"a proof has at most {tree.MAX_PROOF} hashes")
    hashes = tuple(decode_base64(line, "a hash of a proof") for line in lines)
    if any(len(each) != HASH_BYTES for each in hashes):
        raise MalformedNote(f"a hash of a proof has {HASH_BYTES} bytes")
    return hashes


def check_proof(
    proof: LogProof, entry: bytes, policy: LogPolicy, not_before: int = 0
) -> SignedCheckpoint:
    """Checks that the entry is in a log of the policy, as far as the policy's quorum saw it."""
    signed = open_checkpoint(proof.checkpoint, policy, not_before)
    tree.check_inclusion(proof.index, signed.size, tree.leaf_hash(entry), proof.hashes, signed.root)
    return signed
