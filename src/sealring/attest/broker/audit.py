"""The log of what a broker decided: entries in a Merkle tree, each with the checkpoint after it.

audit/<number>   {"entry": ..., "checkpoint": the log's signed note for all entries up to this one}
audit/head       {"size", "peaks": the perfect subtrees of the tree, which give the next root}

An entry is a leaf as canonical JSON, hashed as RFC 6962 does it. It is written in the commit of the
decision that it tells of. An attacker who changes, drops or inserts an entry needs the broker's
key. Cutting off the end leaves a log that is whole by itself: `published` puts the log where
witnesses see it grow, and `check` compares it with checkpoints that were seen earlier.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from sealring.attest.broker.store import Row, View
from sealring.errors import BrokenAuditLog, LogError
from sealring.formats.log import tree
from sealring.formats.log.checkpoints import Checkpoint, SignedCheckpoint, open_checkpoint
from sealring.formats.log.notes import Note, Signer, Verifier
from sealring.formats.log.policy import Log, LogPolicy
from sealring.formats.log.tree import check_entry

PREFIX: Final = "audit/"
HEAD: Final = "audit/head"


@dataclass(frozen=True, slots=True)
class Audited:
    """A log that was read from its first entry to its last, and is whole."""

    entries: list[Row]
    leaves: list[bytes]
    checkpoint: SignedCheckpoint | None
    """None while the log is empty."""

    @property
    def size(self) -> int:
        return len(self.entries)

    @property
    def root(self) -> bytes:
        return tree.tree_root(self.size, self.subtree)

    def subtree(self, height: int, index: int) -> bytes:
        return tree.perfect_hash(self.leaves[index << height : index + 1 << height])

    def proof_from(self, old: int) -> tuple[bytes, list[bytes]]:
        """The root of the first `old` entries, and the proof that the log continues them."""
        proof = tree.consistency_proof(old, self.size, self.subtree)
        return tree.tree_root(old, self.subtree), proof

    def require(self, earlier: Checkpoint, where: str) -> None:
        """BrokenAuditLog unless this log continues a checkpoint that was seen earlier."""
        if earlier.size > self.size:
            raise BrokenAuditLog(
                f"the log ends at {self.size} entries, and {where} has {earlier.size}: its end was "
                "cut off, or an older copy of the store was put in its place"
            )
        if tree.tree_root(earlier.size, self.subtree) != earlier.root:
            raise BrokenAuditLog(
                f"the first {earlier.size} entries of the log are not those of {where}: it was "
                "rewritten"
            )


def append(view: View, signer: Signer, now: float, event: str, facts: Row) -> None:
    size, peaks = _head(view)
    entry = {"number": size, "time": round(now, 3), "event": event, **facts}
    peaks = tree.grown(size, peaks, tree.leaf_hash(check_entry(encode(entry))))
    text = Checkpoint(signer.name, size + 1, tree.folded(peaks)).encode()
    note = Note(text, (signer.sign(text),)).encode().decode()
    view.put(_key(size), {"entry": entry, "checkpoint": note})
    view.put(HEAD, {"size": size + 1, "peaks": [peak.hex() for peak in peaks]})


def newest_time(view: View) -> float:
    """When the newest entry was noted; 0 for an empty log."""
    size, _ = _head(view)
    row = view.get(_key(size - 1)) if size else {"entry": {"time": 0.0}}
    try:
        return float((row or {})["entry"]["time"])
    except (KeyError, TypeError, ValueError):
        raise BrokenAuditLog(f"entry {size - 1} of the log is not what was written") from None


def check(view: View, key: Verifier) -> Audited:
    """The whole log, if it is whole; BrokenAuditLog says where it is not."""
    size, head = _head(view)
    rows = [row for name, row in view.scan(PREFIX, "0") if name != HEAD]
    found = Audited([], [], None)
    peaks: list[bytes] = []
    last: SignedCheckpoint | None = None
    for number, (entry, checkpoint) in enumerate(_checked(rows, key)):
        leaf = tree.leaf_hash(encode(entry))
        peaks = tree.grown(number, peaks, leaf)
        if (checkpoint.size, checkpoint.root) != (number + 1, tree.folded(peaks)):
            raise BrokenAuditLog(f"entry {number} of the log, or one before it, was changed")
        found.entries.append(entry)
        found.leaves.append(leaf)
        last = checkpoint
    if (found.size, peaks) != (size, head):
        raise BrokenAuditLog(
            f"the log ends after {found.size} entries and its head counts {size}: entries were "
            "cut off or added"
        )
    return Audited(found.entries, found.leaves, last)


def checkpoint_at(view: View, size: int, key: Verifier) -> SignedCheckpoint | None:
    """The checkpoint of the first `size` entries; None if there are fewer, or for an empty log."""
    row = view.get(_key(size - 1)) if size else None
    return None if row is None else next(iter(_checked([row], key, size - 1)))[1]


def entries_from(view: View, start: int) -> list[bytes]:
    """The leaves from this number on. The caller compares the root that they lead to."""
    try:
        return [
            encode(row["entry"]) for name, row in view.scan(PREFIX, f"{start:012d}") if name < HEAD
        ]
    except (KeyError, TypeError):
        raise BrokenAuditLog(f"an entry after number {start} is not what was written") from None


def encode(entry: Row) -> bytes:
    return json.dumps(entry, sort_keys=True, separators=(",", ":")).encode()


def _head(view: View) -> tuple[int, list[bytes]]:
    head = view.get(HEAD) or {"size": 0, "peaks": []}
    try:
        return int(head["size"]), [bytes.fromhex(peak) for peak in head["peaks"]]
    except (KeyError, TypeError, ValueError):
        raise BrokenAuditLog(
            "the head of the audit log is not what was written, or was written by an older "
            "sealring: such a store cannot be continued"
        ) from None


def _checked(
    rows: Iterable[Row], key: Verifier, first: int = 0
) -> Iterator[tuple[Row, SignedCheckpoint]]:
    policy = LogPolicy((Log(key),))
    for number, row in enumerate(rows, first):
        try:
            entry = row["entry"]
            if entry["number"] != number:
                raise BrokenAuditLog(f"entry {number} of the log is missing")
            yield entry, open_checkpoint(row["checkpoint"].encode(), policy)
        except (LogError, KeyError, TypeError, AttributeError, ValueError):
            raise BrokenAuditLog(f"entry {number} of the log is not what was written") from None


def _key(number: int) -> str:
    return f"{PREFIX}{number:012d}"
