"""All members of a group took part in the same collectives, and name the same members."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

from sealring.audit.findings import Fault, Finding, Split, split
from sealring.audit.records import Records, Turn
from sealring.provenance.intervals import LinkAccount

GroupKey = tuple[str, str]
"""Name and epoch."""


def check_collectives(records: Records) -> list[Finding]:
    return [*_members(records), *_left_out(records), *_failed(records), *_counts(records)]


def _members(records: Records) -> Iterator[Finding]:
    said: dict[GroupKey, dict[str, tuple[Turn, tuple[int, ...]]]] = {}
    for turn in records.turns:
        for group in turn.interval.groups:
            named = said.setdefault((group.name, group.epoch), {})
            named.setdefault(turn.party, (turn, tuple(group.members)))
            if turn.rank not in group.members:
                text = f"{turn.where} names group {group.name}, of which it is no member"
                yield Finding(Fault.GROUP, (turn.party,), text, (turn.digest,))
    for (name, _), named in said.items():
        sides = split({party: members for party, (_, members) in named.items()})
        if sides is not None:
            yield sides.finding(
                Fault.GROUP,
                f"{named[sides.blamed[0]][0].where} names other members of group {name} than "
                f"{', '.join(sides.against[:4])}",
                {party: turn.digest for party, (turn, _) in named.items()},
            )


def _left_out(records: Records) -> Iterator[Finding]:
    """A final statement names every group that other members' final statements name."""
    finals = {turn.rank: turn for turn in records.turns if turn.interval.final}
    known = {
        (turn.rank, one.name, one.epoch) for turn in finals.values() for one in turn.interval.groups
    }
    told: set[tuple[int, GroupKey]] = set()
    for turn in finals.values():
        for group in turn.interval.groups:
            key = (group.name, group.epoch)
            for rank in sorted(finals.keys() & set(group.members)):
                if group.state == "failed" or (rank, *key) in known or (rank, key) in told:
                    continue
                told.add((rank, key))
                silent = finals[rank]
                others = [one for one in finals.values() if (one.rank, *key) in known]
                yield Finding(
                    Fault.GROUP, (silent.party,),
                    f"{silent.where} is final and leaves out group {group.name}, of which "
                    f"{turn.party} says that it is a member",
                    (silent.digest,), tuple(one.digest for one in others),
                )  # fmt: skip


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


def _counts(records: Records) -> Iterator[Finding]:
    """Compared where no traffic of the group was under way, as all members' links say."""
    members: dict[GroupKey, set[int]] = {}
    by_sequence: dict[tuple[int, GroupKey], dict[int, Turn]] = {}
    last: dict[GroupKey, dict[int, Turn]] = {}
    for turn in sorted(records.turns, key=lambda turn: turn.interval.sequence):
        for group in turn.interval.groups:
            key = (group.name, group.epoch)
            members.setdefault(key, set(group.members))
            if group.state != "failed":
                by_sequence.setdefault((turn.interval.sequence, key), {})[turn.rank] = turn
                if turn.interval.final:
                    last.setdefault(key, {})[turn.rank] = turn
    moments = [(key, turns) for (_, key), turns in sorted(by_sequence.items())]
    quiet = [(key, turns) for key, turns in moments if _is_quiet(key, turns)]
    done: set[GroupKey] = set()
    for key, turns in [*quiet, *last.items()]:
        if key in done or turns.keys() != members[key] or len(turns) < 2:
            continue
        said = {turn.party: _said(key, turn) for turn in turns.values()}
        sides = split(said)
        if sides is not None:
            done.add(key)  # counts are cumulative: later ones differ by the same
            yield _finding(key, {turn.party: turn for turn in turns.values()}, sides)


def _said(key: GroupKey, turn: Turn) -> tuple[tuple[str, int], ...]:
    counts = turn.interval.collectives
    found = {one.kind: one.count for one in counts if (one.group, one.epoch) == key}
    return tuple(sorted((kind, count) for kind, count in found.items() if count))


def _is_quiet(key: GroupKey, turns: dict[int, Turn]) -> bool:
    links = {rank: _links(key, turn) for rank, turn in turns.items()}
    for one, other in permutations(turns, 2):
        here, there = links[one].get(other), links[other].get(one)
        sent = None if here is None else here.sent
        received = None if there is None else there.received
        kept = (here is None or here.sent is not None) and (
            there is None or there.received is not None
        )
        if not kept or (sent.records if sent else 0) != (received.records if received else 0):
            return False
    return True


def _links(key: GroupKey, turn: Turn) -> dict[int, LinkAccount]:
    return {
        link.peer: link
        for link in turn.interval.links
        if (link.group, link.epoch) == key and link.kind == "collective"
    }


def _finding(key: GroupKey, turns: dict[str, Turn], sides: Split) -> Finding:
    one, other = turns[sides.blamed[0]], turns[sides.against[0]]
    return sides.finding(
        Fault.COUNTS,
        f"{one.where} counts {_words(_said(key, one))} in group {key[0]}, and {other.where} "
        f"{_words(_said(key, other))}",
        {party: turn.digest for party, turn in turns.items()},
    )


def _words(counts: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts) or "no collectives"
