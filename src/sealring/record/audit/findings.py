"""The findings and answers of an audit: who is at fault, in which record, what contradicts it.

`Fault` is the only table of what can be found wrong. The answers to claims, the exit status, the
page, the terminal and the JSON use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice, pairwise
from typing import Any, Final, Generic, NamedTuple, Protocol, Self, TypeVar

# ---- what can be found wrong


class Means(StrEnum):
    """How a fault was found."""

    READING = "reading"
    """A file cannot be read as what its name says. That refutes nothing."""
    SIGNATURE = "signature"
    ATTESTATION = "attestation"
    LOG = "log"
    CONTRADICTION = "contradiction"
    """Two records, or a record and a file, cannot both be true."""
    REPLAY = "replay"


class Fault(StrEnum):
    """A fault's code, how it is found, the claims that it refutes, and whether it hides records.

    If it hides records, some may be missing or replaced: then no claim about everything that
    happened is answered with yes.
    """

    way: Means
    refutes: tuple[str, ...]
    hides_records: bool

    UNREADABLE = "unreadable", Means.READING, ("no_gaps",)
    FORGED = "forged", Means.SIGNATURE, ("no_gaps",)
    OUTSIDE_DATES = "outside-dates", Means.SIGNATURE, ("no_gaps",)
    OTHER_JOB = "other-job", Means.SIGNATURE, ("no_gaps",)
    SHARED_KEY = "shared-key", Means.SIGNATURE, ("ranks",)
    EVIDENCE = "evidence", Means.ATTESTATION, ("machines",)
    NOT_ADMITTED = "not-admitted", Means.ATTESTATION, ("machines",)
    NOT_GIVEN = "not-given", Means.LOG, ("machines",)
    REVOKED = "revoked", Means.LOG, ("machines",)
    NOT_LOGGED = "not-logged", Means.LOG, ("no_gaps",), True
    LOG_REFUSED = "log-refused", Means.LOG, ("no_gaps",), True
    WITNESS_FORKED = "witness-forked", Means.LOG
    TWO_STATEMENTS = "two-statements", Means.CONTRADICTION, ("no_gaps",), True
    GAP = "gap", Means.CONTRADICTION, ("no_gaps",), True
    BROKEN_CHAIN = "broken-chain", Means.CONTRADICTION, ("no_gaps",), True
    LINK = "link", Means.CONTRADICTION, ("aggregation",)
    COUNTS = "counts", Means.CONTRADICTION, ("aggregation",)
    GROUP = "group", Means.CONTRADICTION, ("aggregation",)
    CHECKPOINT = "checkpoint", Means.CONTRADICTION, ("trained_only_on",)
    DATA = "data", Means.CONTRADICTION, ("trained_only_on",)
    DISAGREEMENT = "disagreement", Means.CONTRADICTION
    TRANSFORMATION = "transformation", Means.CONTRADICTION, ("trained_only_on", "stages")
    CYCLE = "cycle", Means.CONTRADICTION, ("no_gaps",)
    MODEL = "model", Means.CONTRADICTION
    REPLAY = "replay", Means.REPLAY

    def __new__(
        cls, code: str, way: Means, refutes: tuple[str, ...] = (), hides_records: bool = False
    ) -> Self:
        fault = str.__new__(cls, code)
        fault._value_ = code
        fault.way, fault.refutes, fault.hides_records = way, refutes, hides_records
        return fault


MAX_AGAINST: Final = 64
"""The most contradicting records that a finding names: an attacker could make many of them."""
MAX_TEXT: Final = 2000
"""The most characters of a finding: signers choose the length of names in statements."""


@dataclass(frozen=True, slots=True)
class Finding:
    fault: Fault
    parties: tuple[str, ...]
    """The parties at fault. If there are several, the records do not tell which of them it is."""
    text: str
    records: tuple[str, ...] = ()
    """Digests of the statements that it is about, or a file's name if it could not be read."""
    against: tuple[str, ...] = ()
    """Digests of the statements that contradict them, at most `MAX_AGAINST`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "against", self.against[:MAX_AGAINST])
        if len(self.text) > MAX_TEXT:
            object.__setattr__(self, "text", f"{self.text[:MAX_TEXT]}…")

    @property
    def who(self) -> str:
        return " or ".join(self.parties)

    def as_json(self) -> dict[str, Any]:
        return {
            "fault": self.fault.value,
            "found_by": self.fault.way.value,
            "parties": list(self.parties),
            "text": self.text,
            "records": list(self.records),
            "contradicted_by": list(self.against),
        }


# ---- what claims are answered with


class Said(StrEnum):
    YES = "yes"
    NO = "no"
    NOT_SHOWN = "not shown"


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    claim: str
    said: Said
    text: str
    records: tuple[str, ...] = ()
    """If the answer is no, digests of the statements that show it."""

    def as_json(self) -> dict[str, Any]:
        return {
            "claim": self.claim,
            "answer": self.said.value,
            "text": self.text,
            "records": list(self.records),
        }


# ---- findings about statements


class SignedParty(Protocol):
    """A signed statement. `party` is its signer; `where` says which of the signer's it is."""

    @property
    def digest(self) -> str: ...
    @property
    def party(self) -> str: ...
    @property
    def where(self) -> str: ...


S = TypeVar("S", bound=SignedParty)
V = TypeVar("V")


def blame(
    fault: Fault, text: str, *records: SignedParty, against: Iterable[SignedParty] = (),
    also: Sequence[str] = (),
) -> Finding:  # fmt: skip
    """A finding against the signers of these records and the parties in `also`."""
    return Finding(
        fault,
        tuple(dict.fromkeys([*(one.party for one in records), *also])),
        text,
        tuple(one.digest for one in records),
        tuple(dict.fromkeys(one.digest for one in islice(against, MAX_AGAINST))),
    )


class Split(NamedTuple):
    """Parties that contradict each other, and the side of each."""

    parties: tuple[str, ...]
    """The parties at fault: the minority, or all of them if there is no majority."""
    blamed: tuple[str, ...]
    """The parties whose records the finding is about."""
    against: tuple[str, ...]
    """The parties whose records contradict those."""


def split(votes: Mapping[str, object]) -> Split | None:
    """Splits parties by what they say. None if all say the same. A strict majority is believed."""
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


@dataclass(frozen=True, slots=True)
class Clash(Generic[S, V]):
    """Two statements that differ, one of each side, and all parties on both sides."""

    one: S
    says: V
    other: S
    differs: V
    sides: Split
    digests: Mapping[str, str]

    def finding(self, fault: Fault, text: str) -> Finding:
        records, against = (
            tuple(self.digests[party] for party in side)
            for side in (self.sides.blamed, self.sides.against)
        )
        return Finding(fault, self.sides.parties, text, records, against)


class Votes(Generic[S, V]):
    """What each party says about each thing. A party's first statement about it counts."""

    def __init__(self) -> None:
        self._said: dict[object, dict[str, tuple[S, V]]] = {}

    def add(self, about: object, by: S, said: V) -> tuple[S, V]:
        """Adds a party's word. Returns what the party said first."""
        return self._said.setdefault(about, {}).setdefault(by.party, (by, said))

    def clashes(self) -> Iterator[tuple[Any, Clash[S, V]]]:
        """Each thing about which parties differ, and how they differ."""
        for about, votes in self._said.items():
            found = clash_of(votes.values())
            if found is not None:
                yield about, found


def clash_of(votes: Iterable[tuple[S, V]]) -> Clash[S, V] | None:
    """How the parties' words about one thing differ. None if all say the same."""
    said = {by.party: (by, value) for by, value in votes}
    sides = split({party: value for party, (_, value) in said.items()})
    if sides is None:
        return None
    digests = {party: by.digest for party, (by, _) in said.items()}
    return Clash(*said[sides.blamed[0]], *said[sides.against[0]], sides, digests)


# ---- parties in words


def listed(parties: Sequence[str]) -> str:
    """The first few parties, in words."""
    shown = ", ".join(parties[:4])
    return f"{shown} and {len(parties) - 4} more" if len(parties) > 4 else shown


def absent_ranks(present: Iterable[int], world: int) -> tuple[str, ...]:
    """The missing ranks of a world, as ranges: a statement could name a world of any size."""
    edges = [-1, *sorted({rank for rank in present if rank < world}), world]
    return tuple(
        f"rank {after - 1}" if after - before == 2 else f"ranks {before + 1} to {after - 1}"
        for before, after in pairwise(edges)
        if after - before > 1
    )
