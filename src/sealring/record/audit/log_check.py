"""The run's log: signed, cosigned, whole, and a continuation of what was seen of it elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sealring.errors import (
    ForkedLog,
    LogError,
    NoQuorum,
    NotALog,
    TamperedLog,
    TruncatedLog,
    WrongLog,
)
from sealring.formats.log.checkpoints import SignedCheckpoint, open_checkpoint
from sealring.formats.log.folder import StoredTree, read_checkpoint
from sealring.formats.log.policy import LogPolicy
from sealring.record.audit.findings import Fault, Finding
from sealring.record.audit.hostile import MAX_FILES
from sealring.record.audit.result import LogSeen
from sealring.record.audit.trust import AuditTrust
from sealring.record.provenance.statements import statement_digest

OWNER = "the log's owner"
_PARTIES: dict[type[LogError], tuple[str, ...]] = {
    ForkedLog: (OWNER,),
    NoQuorum: (OWNER, "its witnesses"),
    TamperedLog: ("the disk", OWNER),
    TruncatedLog: (OWNER, "the disk"),
}


@dataclass(slots=True)
class Logged:
    """The entries of a log that is believed, which stay on the disk."""

    stored: StoredTree
    root: bytes
    places: dict[str, int] = field(default_factory=dict)
    """Indices by the digest that a statement has."""

    def without(self, known: Container[str]) -> Iterator[tuple[str, bytes]]:
        """The other entries with their digests, read again and so proved again."""
        for digest, index in self.places.items():
            if digest not in known:
                yield digest, self.stored.entry(index, self.root)


def check_log(
    folder: Path, trust: AuditTrust
) -> tuple[LogSeen | None, Logged | None, list[Finding]]:
    """The log as far as it is believed, its entries, and what is wrong with it.

    Without a log there are no entries: that a statement is missing in it is then not said.
    """
    places: dict[str, int] = {}
    try:
        signed, stored = read_log(
            folder, trust.log, lambda index, entry: places.update({statement_digest(entry): index})
        )
    except LogError as problem:
        return None, None, [refused(problem)]
    logged = Logged(stored, signed.root, places)
    brokers = trust.broker_origins
    seen = [one for one in trust.seen if one.checkpoint.origin not in brokers]
    return LogSeen(signed), logged, check_seen(signed, stored, seen)


def check_seen(
    signed: SignedCheckpoint,
    stored: StoredTree,
    seen: Sequence[SignedCheckpoint],
    parties: tuple[str, ...] = (),
) -> list[Finding]:
    """Whether the log goes on from what was seen of it elsewhere."""
    findings = []
    for earlier in seen:
        try:
            if earlier.checkpoint.origin != signed.checkpoint.origin:
                raise WrongLog(
                    f"the run's log is {signed.checkpoint.origin}, and a checkpoint that was seen "
                    f"elsewhere is of {earlier.checkpoint.origin}: it cannot be compared"
                )
            stored.check_contains(signed.root, earlier.checkpoint, "a checkpoint seen elsewhere")
        except LogError as problem:
            findings.append(refused(problem, parties))
            if isinstance(problem, ForkedLog):
                findings += _forked_witnesses(signed, earlier)
    return findings


def read_log(
    folder: Path, policy: LogPolicy, show: Callable[[int, bytes], None]
) -> tuple[SignedCheckpoint, StoredTree]:
    """The whole log, checked. What `show` was given counts when this has returned."""
    signed = open_checkpoint(read_checkpoint(folder), policy)
    if signed.size > MAX_FILES:
        raise NotALog(f"the log has {signed.size} entries, and an audit reads {MAX_FILES}")
    stored = StoredTree(folder, signed.size)
    stored.check_all(signed.root, show)
    return signed, stored


def refused(problem: LogError, parties: tuple[str, ...] = ()) -> Finding:
    parties = parties or _PARTIES.get(type(problem), (OWNER,))
    return Finding(Fault.LOG_REFUSED, parties, f"{type(problem).__name__}: {problem}")


def _forked_witnesses(one: SignedCheckpoint, other: SignedCheckpoint) -> list[Finding]:
    """Witnesses whose cosignatures are under both views: each broke its promise by that."""
    return [
        Finding(
            Fault.WITNESS_FORKED,
            (f"the witness {key.name}",),
            f"it cosigned two views of the log {one.checkpoint.origin}, of {one.size} and of "
            f"{other.size} entries, that contradict each other: both signatures verify",
        )
        for key in sorted(set(one.cosigned) & set(other.cosigned), key=lambda key: key.name)
    ]
