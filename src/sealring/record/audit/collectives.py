"""All members of a group took part in the same collectives, and name the same members."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from sealring.record.audit.findings import Fault, Finding, Split, split
from sealring.record.audit.links import settled
from sealring.record.audit.records import Records, Turn
from sealring.record.provenance.intervals import GroupEpoch, LinkAccount

GroupKey = tuple[str, str]
"""Name and epoch."""
_Kinds = dict[str, int]
"""Calls that were completed, by their kind."""


def check_collectives(records: Records) -> list[Finding]:
    counts = _Counts(records)
    return [
        *_members(records), *_left_out(records), *_failed(records), *_went_back(records, counts),
        *_disagreeing(records, counts),
    ]  # fmt: skip


def uncompared(records: Records) -> list[str]:
    """Groups with collectives of which not all members give the same last count."""
    counts = _Counts(records)
    members: dict[GroupKey, set[int]] = {}
    last: dict[GroupKey, dict[int, _Kinds]] = {}
    for chain in records.chains.values():
        for turn in chain:
            for group in turn.interval.groups:
                key = (group.name, group.epoch)
                members.setdefault(key, set()).update(group.members)
                last.setdefault(key, {})[turn.rank] = counts.of(key, turn)
    return [
        key[0]
        for key, said in last.items()
        if any(said.values())
        and (said.keys() != members[key] or len({_sorted(one) for one in said.values()}) > 1)
    ]


class _Counts:
    """What each statement counts in each group: looked up, not searched for each time."""

    def __init__(self, records: Records) -> None:
        self._found: dict[tuple[str, str, str], _Kinds] = {}
        for turn in records.turns:
            for one in turn.interval.collectives:
                if one.count:
                    key = (turn.digest, one.group, one.epoch)
                    self._found.setdefault(key, {})[one.kind] = one.count

    def of(self, key: GroupKey, turn: Turn) -> _Kinds:
        return self._found.get((turn.digest, *key), {})


def _sorted(kinds: _Kinds) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(kinds.items()))


def _members(records: Records) -> Iterator[Finding]:
    said: dict[GroupKey, dict[str, tuple[Turn, tuple[int, ...]]]] = {}
    told: set[tuple[str, GroupKey]] = set()
    for turn in (turn for chain in records.chains.values() for turn in chain):
        for group in turn.interval.groups:
            key, members = (group.name, group.epoch), tuple(group.members)
            named = said.setdefault(key, {})
            first, before = named.setdefault(turn.party, (turn, members))
            wrong = _wrong(turn, members)
            if members != before:
                wrong = "with other members than in its own earlier statement"
            if wrong and (turn.party, key) not in told:
                told.add((turn.party, key))
                against = () if first is turn else (first.digest,)
                text = f"{turn.where} names group {group.name}, {wrong}"
                yield Finding(Fault.GROUP, (turn.party,), text, (turn.digest,), against)
    for (name, _), named in said.items():
        sides = split({party: members for party, (_, members) in named.items()})
        if sides is not None:
            yield sides.finding(
                Fault.GROUP,
                f"{named[sides.blamed[0]][0].where} names other members of group {name} than "
                f"{', '.join(sides.against[:4])}",
                {party: turn.digest for party, (turn, _) in named.items()},
            )


def _wrong(turn: Turn, members: tuple[int, ...]) -> str:
    if turn.rank not in members:
        return "of which it is no member"
    if len(set(members)) != len(members) or max(members) >= turn.interval.world:
        return f"with members that a world of {turn.interval.world} does not have"
    return ""


def _left_out(records: Records) -> Iterator[Finding]:
    """How a group ended is named by every member, or by none: closed, failed, or open at the end.

    A process that was started again does not know the groups of the one before it. So where a group
    was closed before the final statements, only chains without a new start are compared.
    """
    finals = {rank: chain[-1] for rank, chain in records.chains.items() if chain[-1].interval.final}
    whole = {
        rank for rank in finals if not any(turn.went_back for turn in records.chains[rank][1:])
    }
    ends: dict[GroupKey, dict[int, tuple[Turn, GroupEpoch]]] = {}
    for rank in finals:
        for turn in records.chains[rank]:
            for group in turn.interval.groups:
                if group.state != "open" or turn.interval.final:
                    ends.setdefault((group.name, group.epoch), {})[rank] = (turn, group)
    for key, named in ends.items():
        alive = [(turn, group) for turn, group in named.values() if group.state != "failed"]
        if not alive:
            continue
        present = finals.keys() if any(turn.interval.final for turn, _ in alive) else whole
        expected = sorted(present & (set(alive[0][1].members) | named.keys()))
        sides = split({finals[rank].party: rank in named for rank in expected})
        if sides is None:
            continue
        turns = {finals[rank].party: named.get(rank, (finals[rank],))[0] for rank in expected}
        one, other = turns[sides.blamed[0]], turns[sides.against[0]]
        silent, speaks = (other, one) if one.rank in named else (one, other)
        yield sides.finding(
            Fault.GROUP,
            f"{silent.where} is final and leaves out group {key[0]}, or how it ended, and "
            f"{speaks.where} names it as a member",
            {party: turn.digest for party, turn in turns.items()},
        )


def _failed(records: Records) -> Iterator[Finding]:
    """Final statements agree on which groups failed: the accounts of those are not compared."""
    said: dict[GroupKey, dict[str, tuple[Turn, bool]]] = {}
    for turn in (turn for turn in records.turns if turn.interval.final):
        for group in turn.interval.groups:
            named = said.setdefault((group.name, group.epoch), {})
            named[turn.party] = (turn, group.state == "failed")
    for (name, _), named in said.items():
        sides = split({party: failed for party, (_, failed) in named.items()})
        if sides is not None:
            words = {True: "failed", False: "did not fail"}
            one, other = named[sides.blamed[0]], named[sides.against[0]]
            yield sides.finding(
                Fault.GROUP,
                f"{one[0].where} is final and says that group {name} {words[one[1]]}, and "
                f"{other[0].where} that it {words[other[1]]}",
                {party: turn.digest for party, (turn, _) in named.items()},
            )


def _went_back(records: Records, counts: _Counts) -> Iterator[Finding]:
    """Counts are cumulative: a rank's own never go back, and no kind disappears."""
    for chain in records.chains.values():
        before: dict[GroupKey, tuple[Turn, _Kinds]] = {}
        for turn in chain:
            for key in ((group.name, group.epoch) for group in turn.interval.groups):
                now = counts.of(key, turn)
                known = before.get(key)
                before[key] = (turn, now)
                if known is None or all(now.get(kind, 0) >= n for kind, n in known[1].items()):
                    continue
                yield Finding(
                    Fault.COUNTS, (turn.party,),
                    f"{turn.where} counts {_words(now)} in group {key[0]}, and its own earlier "
                    f"statement {_words(known[1])}",
                    (turn.digest,), (known[0].digest,),
                )  # fmt: skip


@dataclass(slots=True)
class _Moment:
    """What members say of a group at the same number of their chains."""

    turns: dict[int, Turn] = field(default_factory=dict)
    under_way: dict[tuple[int, int], int] = field(default_factory=dict)
    """By sender and receiver: records that were sent, less those that were received."""
    known: bool = True
    """False: tags were not kept, or a rank signed two statements."""

    def add(self, turn: Turn) -> None:
        self.known &= turn.rank not in self.turns
        self.turns[turn.rank] = turn

    def note(self, rank: int, link: LinkAccount) -> None:
        if link.sent is None or link.received is None:
            self.known = False
            return
        for way, records in (
            ((rank, link.peer), link.sent.records),
            ((link.peer, rank), -link.received.records),
        ):
            self.under_way[way] = self.under_way.get(way, 0) + records

    @property
    def is_quiet(self) -> bool:
        return self.known and not any(self.under_way.values())


def _disagreeing(records: Records, counts: _Counts) -> Iterator[Finding]:
    """Compared where no traffic of the group was under way, as all members' links say."""
    members: dict[GroupKey, set[int]] = {}
    moments: dict[tuple[int, GroupKey], _Moment] = {}
    for turn in records.turns:
        sequence = turn.interval.sequence
        for group in turn.interval.groups:
            key = (group.name, group.epoch)
            members.setdefault(key, set(group.members))
            if group.state != "failed":
                moments.setdefault((sequence, key), _Moment()).add(turn)
    for turn in records.turns:
        for link in turn.interval.links:
            moment = moments.get((turn.interval.sequence, (link.group, link.epoch)))
            if moment is not None and link.kind == "collective":
                moment.note(turn.rank, link)
    last: dict[GroupKey, dict[int, Turn]] = {}
    for (rank, name, epoch), turn in settled(records).items():
        last.setdefault((name, epoch), {})[rank] = turn
    quiet = [
        (place[1], moments[place].turns) for place in sorted(moments) if moments[place].is_quiet
    ]
    done: set[GroupKey] = set()
    for key, turns in [*quiet, *last.items()]:
        if key in done or turns.keys() != members[key] or len(turns) < 2:
            continue
        sides = split({turn.party: _sorted(counts.of(key, turn)) for turn in turns.values()})
        if sides is not None:
            done.add(key)  # counts are cumulative: later ones differ by the same
            yield _finding(key, {turn.party: turn for turn in turns.values()}, sides, counts)


def _finding(key: GroupKey, turns: dict[str, Turn], sides: Split, counts: _Counts) -> Finding:
    one, other = turns[sides.blamed[0]], turns[sides.against[0]]
    return sides.finding(
        Fault.COUNTS,
        f"{one.where} counts {_words(counts.of(key, one))} in group {key[0]}, and {other.where} "
        f"{_words(counts.of(key, other))}",
        {party: turn.digest for party, turn in turns.items()},
    )


def _words(kinds: _Kinds) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in _sorted(kinds)) or "no collectives"
