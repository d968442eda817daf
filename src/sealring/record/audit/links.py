"""Both ends of a link commit to the same records, so their accounts of it must agree.

A commitment is a running hash. Where both ends name the same number of records, the hashes are
equal or one of the two ends lies. At the ends of the chains the numbers must be equal too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from sealring.record.audit.findings import Fault, Finding
from sealring.record.audit.records import Records, Turn
from sealring.record.provenance.intervals import Commitment


class Wire(NamedTuple):
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
    """What one end says of one direction, by the number of records."""

    said: dict[int, tuple[str, Turn]] = field(default_factory=dict)
    last: tuple[int, Turn] | None = None
    kept: bool = True
    """False: a statement says that the tags were not kept."""

    def reaches(self, other: Account) -> bool:
        """Whether both go equally far, so that nothing of either is left uncompared."""
        ends = [one.last[0] for one in (self, other) if one.kept and one.last is not None]
        return len(ends) == 2 and ends[0] == ends[1]


@dataclass(frozen=True, slots=True)
class _Clash:
    wire: Wire
    sender: Turn
    receiver: Turn
    text: str


@dataclass(frozen=True, slots=True)
class LinksChecked:
    findings: list[Finding]
    wires: int
    """Directions of links that some rank names."""
    compared: int
    """Those of which both ends' last accounts name as many records, and could be compared."""


def check_links(records: Records) -> LinksChecked:
    found: list[Finding] = []
    sent: dict[Wire, Account] = {}
    received: dict[Wire, Account] = {}
    named: _Named = {}
    for turn in (turn for chain in records.chains.values() for turn in chain):
        rank = turn.rank
        found += _left_out(sent, received, named, turn)
        for link in turn.interval.links:
            name = (link.group, link.epoch, link.kind)
            out, back = Wire(*name, rank, link.peer), Wire(*name, link.peer, rank)
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
"""By (rank, group, epoch): peer and kind of each link that the rank has named."""


def _left_out(
    sent: dict[Wire, Account], received: dict[Wire, Account], named: _Named, turn: Turn
) -> Iterator[Finding]:
    """Accounts are cumulative: a link of a group that is still named does not disappear."""
    present: _Named = {(turn.rank, one.name, one.epoch): {} for one in turn.interval.groups}
    for link in turn.interval.links:
        present[turn.rank, link.group, link.epoch][link.peer, link.kind] = None
    for key, links in present.items():
        before = named.setdefault(key, {})
        for peer, kind in [] if before.keys() <= links.keys() else before:
            if (peer, kind) in links:
                continue
            wire = Wire(*key[1:], kind, turn.rank, peer)
            back = Wire(*key[1:], kind, peer, turn.rank)
            known = [one.last[1] for one in (sent[wire], received[back]) if one.last is not None]
            yield Finding(
                Fault.LINK, (turn.party,),
                f"{turn.where} leaves out its link with rank {peer} in group {key[1]}, of which "
                "its own earlier statement counts records",
                (turn.digest,), tuple(dict.fromkeys(one.digest for one in known)),
            )  # fmt: skip
            break  # one of them is enough
        before.update(links)


def _note(
    account: Account, wire: Wire, commitment: Commitment | None, turn: Turn
) -> Iterator[Finding]:
    """Adds one statement's word, and compares it with the same rank's earlier ones."""
    if commitment is None:
        account.kept = False
        return
    count, digest = commitment.records, commitment.sha256
    before = account.said.get(count)
    if before is not None and before[0] != digest:
        yield Finding(
            Fault.LINK, (turn.party,),
            f"{turn.where} gives another commitment to the {count} records that {wire.shown} than "
            "its own earlier statement",
            (turn.digest,), (before[1].digest,),
        )  # fmt: skip
    if account.last is not None and count < account.last[0]:
        yield Finding(
            Fault.LINK, (turn.party,),
            f"{turn.where} counts {count} records that {wire.shown}, fewer than its own earlier "
            f"statement ({account.last[0]})",
            (turn.digest,), (account.last[1].digest,),
        )  # fmt: skip
    account.said.setdefault(count, (digest, turn))
    account.last = (count, turn)


def _compare(
    wire: Wire, sent: Account, received: Account, ends: dict[tuple[int, str, str], Turn]
) -> _Clash | None:
    """The first point at which both ends' accounts cannot both be true."""
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


def settled(records: Records) -> dict[tuple[int, str, str], Turn]:
    """By (rank, group, epoch): the statement after which no more traffic of the group came.

    It is the last one that names the group, if the group was closed by then or the chain ends with
    it. A group that failed has none: its ends may have seen different parts of what was under way.
    """
    found: dict[tuple[int, str, str], Turn] = {}
    for chain in records.chains.values():
        for turn in chain:
            for group in turn.interval.groups:
                key = (turn.rank, group.name, group.epoch)
                found.pop(key, None)
                if group.state == "closed" or (group.state == "open" and turn.interval.final):
                    found[key] = turn
    return found


def _blamed(clashes: list[_Clash]) -> Iterator[Finding]:
    """A rank that contradicts several peers, each of which contradicts it alone, is named alone."""
    peers: dict[int, set[int]] = {}
    for clash in clashes:
        peers.setdefault(clash.wire.sender, set()).add(clash.wire.receiver)
        peers.setdefault(clash.wire.receiver, set()).add(clash.wire.sender)
    seen: set[frozenset[int]] = set()
    for clash in clashes:
        pair = frozenset((clash.wire.sender, clash.wire.receiver))
        if pair in seen:  # the other direction, or another group, of the same two
            continue
        seen.add(pair)
        turns = {turn.rank: turn for turn in (clash.sender, clash.receiver)}
        alone = [rank for rank in turns if len(peers[rank]) > 1]
        lone = [rank for rank in turns if len(peers[rank]) == 1]
        if len(alone) == 1 and len(lone) == 1:
            (liar,), (honest,) = alone, lone
            yield Finding(
                Fault.LINK, (turns[liar].party,), f"{turns[liar].where}: {clash.text}; it "
                f"contradicts {len(peers[liar])} peers, who do not contradict each other",
                (turns[liar].digest,), (turns[honest].digest,),
            )  # fmt: skip
        else:
            yield Finding(
                Fault.LINK, tuple(turn.party for turn in turns.values()),
                f"{clash.sender.where}, and {clash.receiver.where}: {clash.text}",
                (clash.sender.digest,), (clash.receiver.digest,),
            )  # fmt: skip
