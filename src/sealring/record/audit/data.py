"""Checks that each sample of a dataset's order is read by one rank, as the ranks' shares say.

Ranges may be long, so positions are not listed. The ranges are cut into pieces wherever one of them
begins or ends. In each piece the ranks' shares of a period must cover it without overlap. Ranks
that hold parts of one model read the same samples, so a share may be read several times if all
shares are read equally often. A range without a share is its rank's alone, and is not compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sealring.record.audit.findings import (
    Fault,
    Finding,
    Votes,
    absent_ranks,
    blame,
    clash_of,
    split,
)
from sealring.record.audit.records import RankInterval, Records
from sealring.record.statements.forms import DataRange, Share

_MAX_LISTED = 1 << 16
"""If the shares of a piece have different periods, at most this many parts of it are compared."""
_MAX_FOUND = 1000
"""The most pieces of a dataset that are reported as wrong: more would tell nothing new."""
MAX_COMPARED = 1 << 21
"""The most ranges that cover a piece, plus their spans in it, summed over all pieces."""
_COMPARED_EACH = 64
"""The further budget for each range. It is bounded, because a hostile worker could state ranges
that overlap in any way."""


class _Budget:
    """How much may still be compared, over the whole audit."""

    def __init__(self, ranges: int) -> None:
        self._left = MAX_COMPARED + _COMPARED_EACH * ranges

    def spend(self, count: int) -> bool:
        self._left -= count
        return self._left >= 0


@dataclass(frozen=True, slots=True)
class _Read:
    turn: RankInterval
    data: DataRange
    share: Share


@dataclass(frozen=True, slots=True)
class _Span:
    """Positions of one period, from `first` to before `end`, that one rank read."""

    first: int
    end: int
    read: _Read


def check_data(records: Records) -> list[Finding]:
    by_sequence: dict[int, list[_Read]] = {}
    left_out = False
    for chain in records.chains.values():
        kept, in_part = _not_undone(chain)
        left_out |= in_part
        for turn in kept:
            shared = [_Read(turn, d, d.share) for d in turn.interval.data if d.share is not None]
            by_sequence.setdefault(turn.interval.sequence, []).extend(
                read for read in shared if read.data.first < read.data.end
            )
    found: list[Finding] = []
    told: set[tuple[str, ...]] = set()
    reads: dict[tuple[str, int], list[_Read]] = {}
    for _, together in sorted(by_sequence.items()):
        if len({read.turn.digest for read in together}) > len({r.turn.rank for r in together}):
            left_out = True  # a rank signed two statements: which of them counts is not known
            continue
        other = _other_datasets(together)
        if other is not None:
            left_out = True
            if other.parties not in told:
                told.add(other.parties)
                found.append(other)
            continue
        for read in together:
            reads.setdefault((read.data.sha256, read.data.epoch), []).append(read)
    places: _Places = {}
    for turn in records.turns:
        places.setdefault(turn.interval.sequence, []).append(turn)
    budget = _Budget(sum(map(len, reads.values())))
    for same in reads.values():
        found += _seeds(same)
        found += _Coverage(same, places, records.world, left_out, budget).findings()
    return found


_Places = dict[int, list[RankInterval]]
"""The statements by their number in a chain."""


def _not_undone(chain: Sequence[RankInterval]) -> tuple[list[RankInterval], bool]:
    """The intervals that count. A run that goes back to a checkpoint reads samples again.

    The flag is True if it went back to the middle of an interval. Then that interval is left out,
    although its first steps count.
    """
    kept: list[RankInterval] = []
    in_part = False
    for turn in chain:
        first = turn.interval.first_step
        while turn.went_back and kept and kept[-1].interval.end_step > first:
            in_part |= kept.pop().interval.first_step < first
        kept.append(turn)
    return kept, in_part


def _other_datasets(reads: Sequence[_Read]) -> Finding | None:
    """Check that ranks which share ranges in one interval also share the datasets."""
    turns = {read.turn.party: read.turn for read in reads}
    said: dict[str, set[tuple[str, int]]] = {}
    for read in reads:
        said.setdefault(read.turn.party, set()).add((read.data.sha256, read.data.epoch))
    clash = clash_of((turns[party], frozenset(named)) for party, named in said.items())
    if clash is None:
        return None
    one, other = clash.one, clash.other
    return clash.finding(
        Fault.DATA,
        f"{one.where} read a share of {_named(one)}, and {other.where} of {_named(other)}",
    )


def _named(turn: RankInterval) -> str:
    return ", ".join(
        f"{data.name} ({data.sha256[:12]}, epoch {data.epoch})" for data in turn.interval.data[:4]
    )


def _seeds(reads: Sequence[_Read]) -> Iterator[Finding]:
    votes: Votes[RankInterval, int | None] = Votes()
    for read in reads:
        first, seed = votes.add("seed", read.turn, read.data.seed)
        if seed != read.data.seed:
            text = f"{read.turn.where} names another seed of the order than its earlier statement"
            yield blame(Fault.DATA, text, read.turn, against=[first])
    for _, clash in votes.clashes():
        yield clash.finding(
            Fault.DATA,
            f"{clash.one.where} reads {reads[0].data.name} in another order (seed {clash.says}) "
            f"than {clash.other.party} (seed {clash.differs})",
        )


class _Coverage:
    """The pieces of one dataset's order in one epoch."""

    def __init__(
        self, reads: Sequence[_Read], places: _Places, world: int, left_out: bool, budget: _Budget
    ) -> None:
        """`left_out`: some intervals are not compared, and may have read what is unread here."""
        self._reads = reads
        self._name = reads[0].data.name
        self._places = places
        self._world = world
        self._left_out = left_out
        self._budget = budget
        self._told: set[tuple[str, ...]] = set()
        self._found = 0

    def findings(self) -> Iterator[Finding]:
        """The findings, only the first one about each set of ranks."""
        edges = sorted({edge for read in self._reads for edge in (read.data.first, read.data.end)})
        starting: dict[int, list[_Read]] = {}
        for read in self._reads:
            starting.setdefault(read.data.first, []).append(read)
        open_reads: list[_Read] = []
        for first, end in pairwise(edges):
            open_reads = [read for read in open_reads if read.data.end > first]
            open_reads += starting.get(first, [])
            if not self._budget.spend(1 + len(open_reads) + _spans_at_most(first, end, open_reads)):
                yield self._too_many()
                return
            if self._left_out and not open_reads:
                continue
            yield from self._piece(first, end, open_reads)
            if self._found > _MAX_FOUND:
                return

    def _too_many(self) -> Finding:
        text = f"the ranges of {self._name} overlap in too many ways to be compared"
        return Finding(Fault.DATA, self._everybody(), text)

    def _everybody(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(read.turn.party for read in self._reads))

    def _is_new(self, parties: tuple[str, ...]) -> bool:
        self._found += 1
        new = parties not in self._told
        self._told.add(parties)
        return new

    def _piece(self, first: int, end: int, reads: Sequence[_Read]) -> Iterator[Finding]:
        """Checks one piece. Each of `reads` covers all of it."""
        if not reads:
            if self._is_new(("no rank",)):  # all of them may be to blame, so it is reported once
                yield Finding(
                    Fault.DATA, self._everybody(),
                    f"samples {first} to {end} of {self._name} were read by no rank, and later "
                    "ones were",
                    (), tuple(read.turn.digest for read in self._reads[:8]),
                )  # fmt: skip
            return
        shares = _one_of_each(reads)
        period = _common_period(first, shares)
        length = end - first
        if _spans_at_most(first, end, shares) > _MAX_LISTED:
            parties = tuple(dict.fromkeys(read.turn.party for read in reads))
            if self._is_new(parties):
                text = f"the shares of samples {first} to {end} of {self._name} have different"
                digests = tuple(dict.fromkeys(read.turn.digest for read in reads))
                yield Finding(Fault.DATA, parties, f"{text} periods", digests)
            return
        if period is None:
            spans = [span for read in shares for span in _listed(first, end, read)]
            period = length
        else:
            spans = [span for read in shares for span in _in_period(first, period, read)]
        yield from self._tiles(first, min(period, length), spans, reads)

    def _tiles(
        self, first: int, length: int, spans: Sequence[_Span], reads: Sequence[_Read]
    ) -> Iterator[Finding]:
        at = 0
        before: _Span | None = None
        unread: tuple[int, int] | None = None
        twice = False
        for span in sorted(spans, key=lambda span: (span.first, span.end)):
            if span.first >= length or span.first == span.end:
                continue
            if span.first < at and before is not None:
                twice = True
                yield from self._twice(first, span, before)
            if span.first > at and unread is None:
                unread = first + at, first + span.first
            if span.end >= at:
                at, before = span.end, span
        if at < length and unread is None:
            unread = first + at, first + length
        if unread is not None and not twice:  # if twice, a rank read another's share, not its own
            yield from self._unread(*unread, reads)

    def _twice(self, first: int, span: _Span, before: _Span) -> Iterator[Finding]:
        one, other = span.read.turn, before.read.turn
        parties = tuple(dict.fromkeys((one.party, other.party)))
        if self._is_new(parties):
            text = (
                f"sample {first + span.first} of {self._name} was read twice: {one.where}, and "
                f"{other.where}"
            )
            yield blame(Fault.DATA, text, one, against=[other], also=[other.party])

    def _unread(self, first: int, end: int, reads: Sequence[_Read]) -> Iterator[Finding]:
        """Reports samples that no rank read.

        At fault are the ranks that read nothing of the piece. If there are none, those whose shares
        differ from most ranks' are at fault. A second gap in the piece would tell nothing new.
        """
        readers = {read.turn.rank: read for read in reads}
        parties = absent_ranks(readers, self._world)
        blamed: set[str] | None = None
        if not parties:
            lengths = {read.turn.party: read.share.length for read in readers.values()}
            sides = split(lengths)
            parties = tuple(lengths) if sides is None else sides.parties
            blamed = set(parties)
        if not self._is_new(parties):
            return
        sequence = reads[0].turn.interval.sequence
        stated = self._places.get(sequence, [])
        if not self._budget.spend(len(stated)):
            self._found = _MAX_FOUND + 1  # nothing more is compared
            yield self._too_many()
            return

        def at_fault(turn: RankInterval) -> bool:
            return turn.rank not in readers if blamed is None else turn.party in blamed

        yield Finding(
            Fault.DATA, parties,
            f"samples {first} to {end} of {self._name} were read by no rank, and their neighbours "
            "were",
            tuple(turn.digest for turn in stated if at_fault(turn)),
            tuple(read.turn.digest for read in readers.values() if not at_fault(read.turn)),
        )  # fmt: skip


def _one_of_each(reads: Sequence[_Read]) -> Sequence[_Read]:
    """If all shares have equally many readers, return one reader of each. Otherwise return all."""
    counts = Counter((read.data.first, read.share) for read in reads)
    if len(set(counts.values())) > 1:
        return reads
    return list({(read.data.first, read.share): read for read in reads}.values())


def _spans_at_most(first: int, end: int, reads: Sequence[_Read]) -> int:
    """The most spans that must be listed one by one, because the shares' periods differ. Else 0."""
    if not reads or _common_period(first, reads) is not None:
        return 0
    return sum(1 + (end - first) // read.share.period for read in reads)


def _common_period(first: int, reads: Sequence[_Read]) -> int | None:
    """The period of all shares, if the piece begins at the same place of it for all. Else None."""
    found = {(read.share.period, (first - read.data.first) % read.share.period) for read in reads}
    return next(iter(found))[0] if len(found) == 1 else None


def _in_period(first: int, period: int, read: _Read) -> Iterator[_Span]:
    """Positions relative to `first`, within one period."""
    start = (read.share.offset - (first - read.data.first)) % period
    end = start + read.share.length
    yield _Span(start, min(end, period), read)
    if end > period:
        yield _Span(0, end - period, read)


def _listed(first: int, end: int, read: _Read) -> Iterator[_Span]:
    period = read.share.period
    start = read.data.first + (first - read.data.first) // period * period
    for at in range(start + read.share.offset, end, period):
        low, high = max(at, first) - first, min(at + read.share.length, end) - first
        if low < high:
            yield _Span(low, high, read)
