"""The log of what a broker decided: entries in a Merkle tree, each with the checkpoint after it.

audit/<number>   {"entry": ..., "checkpoint": the log's signed note for all entries up to this one}
audit/head       {"size", "peaks": the perfect subtrees of the tree, which give the next root}

An entry is canonical JSON and a leaf of the tree, hashed as in RFC 6962. It is committed together
with the decision that it records. To change, drop or insert an entry, an attacker needs the
broker's key. But a log whose end was cut off is still consistent. So `PublishedLog` publishes the
log where witnesses see it grow, and `Audited.require` compares it with earlier checkpoints.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sealring.attest.broker.store import LedgerStore, Row, StoreView
from sealring.errors import ForkedLog, LogError, TamperedLog, TamperedStore
from sealring.formats.files import read_limited, replace_private
from sealring.formats.log import tree, witnesses
from sealring.formats.log.checkpoints import Checkpoint, SignedCheckpoint, open_checkpoint
from sealring.formats.log.folder import CHECKPOINT, LogWriter, create_log
from sealring.formats.log.notes import MAX_NOTE_BYTES, Note, Signer, Verifier
from sealring.formats.log.policy import Log, LogPolicy
from sealring.formats.log.tree import check_entry

PREFIX: Final = "audit/"
HEAD: Final = "audit/head"


@dataclass(frozen=True, slots=True)
class Audited:
    """A log that was read and checked from its first entry to its last."""

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
        """Raises broker.broken_audit_log unless this log continues the `earlier` checkpoint."""
        if earlier.size > self.size:
            raise _broken(
                f"the log ends at {self.size} entries, and {where} has {earlier.size}: its end was "
                "cut off, or an older copy of the store was put in its place"
            )
        if tree.tree_root(earlier.size, self.subtree) != earlier.root:
            raise _broken(
                f"the first {earlier.size} entries of the log are not those of {where}: it was "
                "rewritten"
            )


def append(view: StoreView, signer: Signer, now: float, event: str, facts: Row) -> None:
    size, peaks = _head(view)
    entry = {"number": size, "time": round(now, 3), "event": event, **facts}
    peaks = tree.grown(size, peaks, tree.leaf_hash(check_entry(encode(entry))))
    text = Checkpoint(signer.name, size + 1, tree.folded(peaks)).encode()
    note = Note(text, (signer.sign(text),)).encode().decode()
    view.put(_key(size), {"entry": entry, "checkpoint": note})
    view.put(HEAD, {"size": size + 1, "peaks": [peak.hex() for peak in peaks]})


def newest_time(view: StoreView) -> float:
    """The time of the newest entry; 0 for an empty log."""
    size, _ = _head(view)
    row = view.get(_key(size - 1)) if size else {"entry": {"time": 0.0}}
    try:
        return float((row or {})["entry"]["time"])
    except (KeyError, TypeError, ValueError):
        raise _broken(f"entry {size - 1} of the log is not what was written") from None


def check(view: StoreView, key: Verifier) -> Audited:
    """Reads and checks the whole log. broker.broken_audit_log says where it is broken."""
    size, head = _head(view)
    rows = [row for name, row in view.scan(PREFIX, "0") if name != HEAD]
    found = Audited([], [], None)
    peaks: list[bytes] = []
    last: SignedCheckpoint | None = None
    for number, (entry, checkpoint) in enumerate(_checked(rows, key)):
        leaf = tree.leaf_hash(encode(entry))
        peaks = tree.grown(number, peaks, leaf)
        if (checkpoint.size, checkpoint.root) != (number + 1, tree.folded(peaks)):
            raise _broken(f"entry {number} of the log, or one before it, was changed")
        found.entries.append(entry)
        found.leaves.append(leaf)
        last = checkpoint
    if (found.size, peaks) != (size, head):
        raise _broken(
            f"the log ends after {found.size} entries and its head counts {size}: entries were "
            "cut off or added"
        )
    return Audited(found.entries, found.leaves, last)


def checkpoint_at(view: StoreView, size: int, key: Verifier) -> SignedCheckpoint | None:
    """The checkpoint of the first `size` entries; None if there are fewer, or for an empty log."""
    row = view.get(_key(size - 1)) if size else None
    return None if row is None else next(iter(_checked([row], key, size - 1)))[1]


def entries_from(view: StoreView, start: int) -> list[bytes]:
    """The leaves from number `start` on. The caller must check the root that they lead to."""
    try:
        return [
            encode(row["entry"]) for name, row in view.scan(PREFIX, f"{start:012d}") if name < HEAD
        ]
    except (KeyError, TypeError):
        raise _broken(f"an entry after number {start} is not what was written") from None


def encode(entry: Row) -> bytes:
    return json.dumps(entry, sort_keys=True, separators=(",", ":")).encode()


def _head(view: StoreView) -> tuple[int, list[bytes]]:
    head = view.get(HEAD) or {"size": 0, "peaks": []}
    try:
        return int(head["size"]), [bytes.fromhex(peak) for peak in head["peaks"]]
    except (KeyError, TypeError, ValueError):
        raise _broken(
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
                raise _broken(f"entry {number} of the log is missing")
            yield entry, open_checkpoint(row["checkpoint"].encode(), policy)
        except (LogError, KeyError, TypeError, AttributeError, ValueError):
            raise _broken(f"entry {number} of the log is not what was written") from None


def _broken(problem: str) -> TamperedStore:
    return TamperedStore(problem, code="broker.broken_audit_log")


def _key(number: int) -> str:
    return f"{PREFIX}{number:012d}"


_LOG = logging.getLogger("sealring.attest.broker")
_COSIGN_SECONDS: Final = 1800.0
"""An unchanged log is cosigned again after this time, so readers know that it is the newest."""
_LOCK_SECONDS: Final = 30.0


@dataclass(slots=True)
class PublishedLog:
    folder: Path
    signer: Signer
    remembered: Path
    """The file that holds the last published checkpoint, even if the folder is lost."""
    policy: LogPolicy | None = None
    """If given, the witnesses that it names are asked to cosign."""
    clock: Callable[[], float] = time.monotonic
    _cosigned: tuple[int, float] = field(default=(-1, 0.0), init=False)
    """The size of the log that was cosigned last, and the time of it."""

    def update(self, store: LedgerStore) -> SignedCheckpoint:
        """Publishes the store's new entries and has the log cosigned."""
        try:
            return self._update(store)
        except ForkedLog as error:
            if error.code != "log.truncated_log":
                raise
            # Another broker of this store may have published more after we read the store.
            return self._update(store)

    def _update(self, store: LedgerStore) -> SignedCheckpoint:
        if not (self.folder / CHECKPOINT).exists():
            create_log(self.folder, self.signer)
        with LogWriter(self.folder, self.signer, wait=_LOCK_SECONDS) as writer:
            entries, newest = store.submit(lambda view: self._new(view, writer.checkpoint)).result()
            if newest is not None and entries:
                writer.append(entries, expected=newest.root)
            replace_private(self.remembered, writer.checkpoint.note.encode())
            if self.policy is None or not self._is_due(writer.checkpoint.size):
                return writer.checkpoint
            return self._cosign(writer, self.policy)

    def _new(
        self, view: StoreView, published: SignedCheckpoint
    ) -> tuple[list[bytes], SignedCheckpoint | None]:
        """The entries that are not published yet, and the checkpoint after the last of them."""
        key = self.signer.verifier
        self._require(view, published, self.folder)
        # The folder may be new, so the store is also compared with the last published checkpoint.
        if (content := read_limited(self.remembered, MAX_NOTE_BYTES)) is not None:
            last = open_checkpoint(content, LogPolicy((Log(key),)))
            self._require(view, last, self.remembered)
        entries = entries_from(view, published.size)
        newest = checkpoint_at(view, published.size + len(entries), key)
        if entries and newest is None:
            raise TamperedLog("entries of the broker's audit log are missing in its store")
        return entries, newest

    def _require(self, view: StoreView, seen: SignedCheckpoint, where: Path) -> None:
        """Raises ForkedLog unless the store's log continues the published checkpoint `seen`."""
        there = checkpoint_at(view, seen.size, self.signer.verifier)
        if seen.size and there is None:
            raise ForkedLog(
                f"the broker's store ends before entry {seen.size - 1} of its audit log, which was "
                f"published ({where}): an older copy was put in its place",
                code="log.truncated_log",
            )
        if there is not None and there.root != seen.root:
            raise ForkedLog(
                f"the broker's store has another audit log than was published ({where}), among "
                f"the first {seen.size} entries: it was rewritten"
            )

    def _is_due(self, size: int) -> bool:
        cosigned, when = self._cosigned
        return size != cosigned or self.clock() - when > _COSIGN_SECONDS

    def _cosign(self, writer: LogWriter, policy: LogPolicy) -> SignedCheckpoint:
        current, stored = writer.checkpoint, writer.stored
        answers = witnesses.cosign(
            current, lambda old: stored.consistency_proof(old, current.root), policy
        )
        signed = writer.add_cosignatures(answers.cosignatures.values())
        for fault in answers.faults.values():
            _LOG.warning("%s", fault)
        counted = open_checkpoint(signed.note.encode(), policy)  # log.no_quorum
        self._cosigned = (counted.size, self.clock())
        return counted
