"""What an audit found wrong: who is at fault, in which record, and which records contradict it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any, Final, NamedTuple


class Way(StrEnum):
    """How a fault is found."""

    READING = "reading"
    """A file cannot be read as what its name says."""
    SIGNATURE = "signature"
    ATTESTATION = "attestation"
    LOG = "log"
    CONTRADICTION = "contradiction"
    """Two records, or a record and a file, cannot both be true."""
    REPLAY = "replay"


class Fault(StrEnum):
    UNREADABLE = "unreadable"
    FORGED = "forged"
    OUTSIDE_DATES = "outside-dates"
    OTHER_JOB = "other-job"
    SHARED_KEY = "shared-key"
    EVIDENCE = "evidence"
    NOT_ADMITTED = "not-admitted"
    NOT_GIVEN = "not-given"
    REVOKED = "revoked"
    NOT_LOGGED = "not-logged"
    LOG_REFUSED = "log-refused"
    WITNESS_FORKED = "witness-forked"
    TWO_STATEMENTS = "two-statements"
    GAP = "gap"
    BROKEN_CHAIN = "broken-chain"
    LINK = "link"
    COUNTS = "counts"
    GROUP = "group"
    CHECKPOINT = "checkpoint"
    DATA = "data"
    DISAGREEMENT = "disagreement"
    TRANSFORMATION = "transformation"
    CYCLE = "cycle"
    MODEL = "model"
    REPLAY = "replay"


WAYS: Final = {
    Fault.UNREADABLE: Way.READING,
    Fault.FORGED: Way.SIGNATURE,
    Fault.OUTSIDE_DATES: Way.SIGNATURE,
    Fault.OTHER_JOB: Way.SIGNATURE,
    Fault.SHARED_KEY: Way.SIGNATURE,
    Fault.EVIDENCE: Way.ATTESTATION,
    Fault.NOT_ADMITTED: Way.ATTESTATION,
    Fault.NOT_GIVEN: Way.LOG,
    Fault.REVOKED: Way.LOG,
    Fault.NOT_LOGGED: Way.LOG,
    Fault.LOG_REFUSED: Way.LOG,
    Fault.WITNESS_FORKED: Way.LOG,
    Fault.REPLAY: Way.REPLAY,
}
"""All others are found by contradiction."""


MAX_AGAINST: Final = 64
"""Records that a finding names as contradicting it. A stranger could have any number of each."""
MAX_TEXT: Final = 2000
"""Characters of a finding: names in statements are as long as their signer likes."""


@dataclass(frozen=True, slots=True)
class Finding:
    fault: Fault
    parties: tuple[str, ...]
    """At fault. Where there are several, the records do not tell which of them."""
    text: str
    records: tuple[str, ...] = ()
    """Digests of the statements it is about; the name of the file where none could be read."""
    against: tuple[str, ...] = ()
    """Digests of statements that contradict them, the first `MAX_AGAINST`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "against", self.against[:MAX_AGAINST])
        if len(self.text) > MAX_TEXT:
            object.__setattr__(self, "text", f"{self.text[:MAX_TEXT]}…")

    @property
    def way(self) -> Way:
        return WAYS.get(self.fault, Way.CONTRADICTION)

    def as_json(self) -> dict[str, Any]:
        return {
            "fault": self.fault.value,
            "found_by": self.way.value,
            "parties": list(self.parties),
            "text": self.text,
            "records": list(self.records),
            "contradicted_by": list(self.against),
        }


def listed(parties: Sequence[str]) -> str:
    """The first few of them, in words."""
    shown = ", ".join(parties[:4])
    return f"{shown} and {len(parties) - 4} more" if len(parties) > 4 else shown


def absent_ranks(present: Iterable[int], world: int) -> tuple[str, ...]:
    """The other ranks of a world, as ranges: a statement could name a world of any size."""
    edges = [-1, *sorted({rank for rank in present if rank < world}), world]
    return tuple(
        f"rank {after - 1}" if after - before == 2 else f"ranks {before + 1} to {after - 1}"
        for before, after in pairwise(edges)
        if after - before > 1
    )


class Split(NamedTuple):
    """Parties that contradict each other, and on which side each stands."""

    parties: tuple[str, ...]
    """At fault: the minority, or all of them where there is no majority."""
    blamed: tuple[str, ...]
    """Those whose records the finding is about."""
    against: tuple[str, ...]
    """Those whose records contradict them."""

    def finding(self, fault: Fault, text: str, digests: Mapping[str, str]) -> Finding:
        """`digests` has the record of each party."""
        records, against = (
            tuple(digests[party] for party in side) for side in (self.blamed, self.against)
        )
        return Finding(fault, self.parties, text, records, against)


def split(votes: Mapping[str, object]) -> Split | None:
    """None where all parties say the same. A strict majority of several parties is believed."""
    camps: dict[object, list[str]] = {}
    for party, said in votes.items():
        camps.setdefault(said, []).append(party)
    if len(camps) < 2:
        return None
    largest = max(camps.values(), key=len)
    others = tuple(one for one in votes if one not in largest)
    if 2 * len(largest) > len(votes):
        return Split(others, others, tuple(largest))
    return Split(tuple(votes), others, tuple(largest))
