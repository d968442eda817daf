"""Checks what went between ranks: the links between two ranks, and the collectives of a group.

Both ends of a link must commit to the same records, and all members of a group must have taken part
in the same collectives. A commitment is a running hash. If both ends name the same number of
records and the hashes differ, one end lies. At the ends of the chains the numbers must be equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from sealring.record.audit.findings import Fault, Finding, Votes, blame, clash_of
from sealring.record.audit.records import RankInterval, Records
from sealring.record.statements.forms import Commitment, GroupEpoch, LinkAccount

# ---- links


class LinkDirection(NamedTuple):
    """One direction of a link."""

    group: str
    epoch: str
    kind: str
    sender: int
    receiver: int

    @property
    def shown(self) -> str:
        what = "collectives" if self.kind == "collective" else "messages"
        return f"rank {self.sender} sent to rank {self.receiver} in {what} of group {self.group}"


@dataclass(slots=True)
class Account:
    """What one end says about one direction of a link, by the number of records."""

    said: dict[int, tuple[str, RankInterval]] = field(default_factory=dict)
    last: tuple[int, RankInterval] | None = None
    kept: bool = True
    """False if a statement says that the tags were not kept."""

    def reaches(self, other: Account) -> bool:
        """Whether both accounts end at the same count, so that nothing is left uncompared."""
        ends = [one.last[0] for one in (self, other) if one.kept and one.last is not None]
        return len(ends) == 2 and ends[0] == ends[1]


@dataclass(frozen=True, slots=True)
class _Clash:
    wire: LinkDirection
    sender: RankInterval
    receiver: RankInterval
    text: str


@dataclass(frozen=True, slots=True)
class LinksChecked:
    findings: list[Finding]
    wires: int
    """The number of directions of links that some rank names."""
    compared: int
    """The number of directions whose two ends' last accounts have the same count."""


def check_links(records: Records) -> LinksChecked:
    found: list[Finding] = []
    sent: dict[LinkDirection, Account] = {}
    received: dict[LinkDirection, Account] = {}
    named: _Named = {}
    for turn in (turn for chain in records.chains.values() for turn in chain):
        rank = turn.rank
        found += _links_left_out(sent, received, named, turn)
        for link in turn.interval.links:
            name = (link.group, link.epoch, link.kind)
            out, back = LinkDirection(*name, rank, link.peer), LinkDirection(*name, link.peer, rank)
            for accounts, wire, said in ((sent, out, link.sent), (received, back, link.received)):
                account = accounts.get(wire)
                if account is None:
                    account = accounts[wire] = Account()
                found += _note(account, wire, said, turn)
    ends = settled(records)
    clashes, compared = [], 0
    wires = sorted(sent.keys() | received.keys())
    for wire in wires:
        here, there = sent.get(wire, Account()), received.get(wire, Account())
        compared += here.reaches(there)
        clash = _compare(wire, here, there, ends)
        if clash is not None:
            clashes.append(clash)
    return LinksChecked([*found, *_blamed(clashes)], len(wires), compared)


_Named = dict[tuple[int, str, str], dict[tuple[int, str], None]]
"""The peer and kind of each link that a rank has named, by (rank, group, epoch)."""


def _links_left_out(
    sent: dict[LinkDirection, Account],
    received: dict[LinkDirection, Account],
    named: _Named,
    turn: RankInterval,
) -> Iterator[Finding]:
    """Finds links that are no longer named, although their group is: accounts are cumulative."""
    present: _Named = {(turn.rank, one.name, one.epoch): {} for one in turn.interval.groups}
    for link in turn.interval.links:
        present[turn.rank, link.group, link.epoch][link.peer, link.kind] = None
    for key, links in present.items():
        before = named.setdefault(key, {})
        for peer, kind in [] if before.keys() <= links.keys() else before:
            if (peer, kind) in links:
                continue
            wire = LinkDirection(*key[1:], kind, turn.rank, peer)
            back = LinkDirection(*key[1:], kind, peer, turn.rank)
            known = [one.last[1] for one in (sent[wire], received[back]) if one.last is not None]
            text = (
                f"{turn.where} leaves out its link with rank {peer} in group {key[1]}, of which "
                "its own earlier statement counts records"
            )
            yield blame(Fault.LINK, text, turn, against=known)
            break  # one finding is enough
        before.update(links)


def _note(
    account: Account, wire: LinkDirection, commitment: Commitment | None, turn: RankInterval
) -> Iterator[Finding]:
    """Adds one statement's account, and compares it with the same rank's earlier ones."""
    if commitment is None:
        account.kept = False
        return
    count, digest = commitment.records, commitment.sha256
    before = account.said.get(count)
    if before is not None and before[0] != digest:
        text = (
            f"{turn.where} gives another commitment to the {count} records that {wire.shown} than "
            "its own earlier statement"
        )
        yield blame(Fault.LINK, text, turn, against=[before[1]])
    if account.last is not None and count < account.last[0]:
        text = (
            f"{turn.where} counts {count} records that {wire.shown}, fewer than its own earlier "
            f"statement ({account.last[0]})"
        )
        yield blame(Fault.LINK, text, turn, against=[account.last[1]])
    account.said.setdefault(count, (digest, turn))
    account.last = (count, turn)


def _compare(
    wire: LinkDirection,
    sent: Account,
    received: Account,
    ends: dict[tuple[int, str, str], RankInterval],
) -> _Clash | None:
    """The first point at which the accounts of both ends cannot both be true."""
    for count in sorted(sent.said.keys() & received.said.keys()):
        (one, sender), (other, receiver) = sent.said[count], received.said[count]
        if one != other:
            text = f"of the first {count} records that {wire.shown}, the two commitments differ"
            return _Clash(wire, sender, receiver, text)
    last_sender = ends.get((wire.sender, wire.group, wire.epoch))
    last_receiver = ends.get((wire.receiver, wire.group, wire.epoch))
    if last_sender is None or last_receiver is None or not (sent.kept and received.kept):
        return None
    counts = sent.last[0] if sent.last else 0, received.last[0] if received.last else 0
    if counts[0] != counts[1]:
        text = (
            f"rank {wire.sender} counts {counts[0]} records and rank {wire.receiver} "
            f"{counts[1]}, of those that {wire.shown}"
        )
        return _Clash(wire, last_sender, last_receiver, text)
    return None


def settled(records: Records) -> dict[tuple[int, str, str], RankInterval]:
    """The statement after which a group had no more traffic, by (rank, group, epoch).

    It is the last statement that names the group, if the group was closed by then or the chain ends
    with it. A failed group has none: its members may have seen different parts of its last traffic.
    """
    found: dict[tuple[int, str, str], RankInterval] = {}
    for chain in records.chains.values():
        for turn in chain:
            for group in turn.interval.groups:
                key = (turn.rank, group.name, group.epoch)
                found.pop(key, None)
                if group.state == "closed" or (group.state == "open" and turn.interval.final):
                    found[key] = turn
    return found


def _blamed(clashes: list[_Clash]) -> Iterator[Finding]:
    """Names a rank alone if it contradicts several peers, and they contradict only that rank."""
    peers: dict[int, set[int]] = {}
    for clash in clashes:
        peers.setdefault(clash.wire.sender, set()).add(clash.wire.receiver)
        peers.setdefault(clash.wire.receiver, set()).add(clash.wire.sender)
    seen: set[frozenset[int]] = set()
    for clash in clashes:
        pair = frozenset((clash.wire.sender, clash.wire.receiver))
        if pair in seen:  # the same two ranks, in the other direction or another group
            continue
        seen.add(pair)
        turns = {turn.rank: turn for turn in (clash.sender, clash.receiver)}
        alone = [rank for rank in turns if len(peers[rank]) > 1]
        lone = [rank for rank in turns if len(peers[rank]) == 1]
        if len(alone) == 1 and len(lone) == 1:
            liar, honest = turns[alone[0]], turns[lone[0]]
            text = (
                f"{liar.where}: {clash.text}; it contradicts {len(peers[liar.rank])} peers, who do "
                "not contradict each other"
            )
            yield blame(Fault.LINK, text, liar, against=[honest])
        else:
            one, other = clash.sender, clash.receiver
            text = f"{one.where}, and {other.where}: {clash.text}"
            yield blame(Fault.LINK, text, one, against=[other], also=[other.party])


# ---- collectives


GroupKey = tuple[str, str]
"""The name and the epoch of a group."""
_Kinds = dict[str, int]
"""The number of completed calls of each kind."""


def check_collectives(records: Records) -> list[Finding]:
    counts = _Counts(records)
    return [
        *_members(records), *_groups_left_out(records), *_failed(records),
        *_went_back(records, counts), *_disagreeing(records, counts),
    ]  # fmt: skip


def uncompared(records: Records) -> list[str]:
    """Groups with collectives whose members do not all give the same last count."""
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
    """What each statement counts in each group, in a table for fast lookup."""

    def __init__(self, records: Records) -> None:
        self._found: dict[tuple[str, str, str], _Kinds] = {}
        for turn in records.turns:
            for one in turn.interval.collectives:
                if one.count:
                    key = (turn.digest, one.group, one.epoch)
                    self._found.setdefault(key, {})[one.kind] = one.count

    def of(self, key: GroupKey, turn: RankInterval) -> _Kinds:
        return self._found.get((turn.digest, *key), {})


def _sorted(kinds: _Kinds) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(kinds.items()))


def _members(records: Records) -> Iterator[Finding]:
    votes: Votes[RankInterval, tuple[int, ...]] = Votes()
    told: set[tuple[str, GroupKey]] = set()
    for turn in (turn for chain in records.chains.values() for turn in chain):
        for group in turn.interval.groups:
            key, members = (group.name, group.epoch), tuple(group.members)
            first, before = votes.add(key, turn, members)
            wrong = _wrong(turn, members)
            if members != before:
                wrong = "with other members than in its own earlier statement"
            if wrong and (turn.party, key) not in told:
                told.add((turn.party, key))
                against = () if first is turn else (first,)
                text = f"{turn.where} names group {group.name}, {wrong}"
                yield blame(Fault.GROUP, text, turn, against=against)
    for (name, _), clash in votes.clashes():
        others = ", ".join(clash.sides.against[:4])
        text = f"{clash.one.where} names other members of group {name} than {others}"
        yield clash.finding(Fault.GROUP, text)


def _wrong(turn: RankInterval, members: tuple[int, ...]) -> str:
    if turn.rank not in members:
        return "of which it is no member"
    if len(set(members)) != len(members) or max(members) >= turn.interval.world:
        return f"with members that a world of {turn.interval.world} does not have"
    return ""


def _groups_left_out(records: Records) -> Iterator[Finding]:
    """All members name how a group ended, or none does: closed, failed, or open at the end.

    A restarted process does not know the groups of the process before it. So if a group was closed
    before the final statements, only chains without a restart are compared.
    """
    finals = {rank: chain[-1] for rank, chain in records.chains.items() if chain[-1].interval.final}
    whole = {
        rank for rank in finals if not any(turn.went_back for turn in records.chains[rank][1:])
    }
    ends: dict[GroupKey, dict[int, tuple[RankInterval, GroupEpoch]]] = {}
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
        clash = clash_of((named.get(rank, (finals[rank],))[0], rank in named) for rank in expected)
        if clash is None:
            continue
        silent, speaks = (clash.other, clash.one) if clash.says else (clash.one, clash.other)
        yield clash.finding(
            Fault.GROUP,
            f"{silent.where} is final and leaves out group {key[0]}, or how it ended, and "
            f"{speaks.where} names it as a member",
        )


def _failed(records: Records) -> Iterator[Finding]:
    """Final statements must agree on which groups failed: their accounts are not compared."""
    said: dict[GroupKey, dict[int, tuple[RankInterval, str]]] = {}
    for turn in (turn for turn in records.turns if turn.interval.final):
        for group in turn.interval.groups:
            word = "failed" if group.state == "failed" else "did not fail"
            said.setdefault((group.name, group.epoch), {})[turn.rank] = (turn, word)
    for (name, _), named in said.items():
        clash = clash_of(named.values())
        if clash is not None:
            yield clash.finding(
                Fault.GROUP,
                f"{clash.one.where} is final and says that group {name} {clash.says}, and "
                f"{clash.other.where} that it {clash.differs}",
            )


def _went_back(records: Records, counts: _Counts) -> Iterator[Finding]:
    """Counts are cumulative: a rank's own counts never go back, and no kind disappears."""
    for chain in records.chains.values():
        before: dict[GroupKey, tuple[RankInterval, _Kinds]] = {}
        for turn in chain:
            for key in ((group.name, group.epoch) for group in turn.interval.groups):
                now = counts.of(key, turn)
                known = before.get(key)
                before[key] = (turn, now)
                if known is None or all(now.get(kind, 0) >= n for kind, n in known[1].items()):
                    continue
                text = (
                    f"{turn.where} counts {_words(now)} in group {key[0]}, and its own earlier "
                    f"statement {_words(known[1])}"
                )
                yield blame(Fault.COUNTS, text, turn, against=[known[0]])


@dataclass(slots=True)
class _Moment:
    """What members say about a group in statements with the same number."""

    turns: dict[int, RankInterval] = field(default_factory=dict)
    under_way: dict[tuple[int, int], int] = field(default_factory=dict)
    """The number of records sent but not received, by sender and receiver."""
    known: bool = True
    """False if tags were not kept, or a rank signed two statements."""

    def add(self, turn: RankInterval) -> None:
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
    """Compares members' counts at moments when no traffic of the group was under way.

    The accounts of all members' links show such moments.
    """
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
    last: dict[GroupKey, dict[int, RankInterval]] = {}
    for (rank, name, epoch), turn in settled(records).items():
        last.setdefault((name, epoch), {})[rank] = turn
    quiet = [
        (place[1], moments[place].turns) for place in sorted(moments) if moments[place].is_quiet
    ]
    done: set[GroupKey] = set()
    for key, turns in [*quiet, *last.items()]:
        if key in done or turns.keys() != members[key] or len(turns) < 2:
            continue
        clash = clash_of((turn, _sorted(counts.of(key, turn))) for turn in turns.values())
        if clash is not None:
            done.add(key)  # counts are cumulative, so later ones differ too
            yield clash.finding(
                Fault.COUNTS,
                f"{clash.one.where} counts {_words(dict(clash.says))} in group {key[0]}, and "
                f"{clash.other.where} {_words(dict(clash.differs))}",
            )


def _words(kinds: _Kinds) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in _sorted(kinds)) or "no collectives"
