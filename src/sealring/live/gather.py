"""The status of this process, from its flight recorders.

All of it is bounded, however many groups there are and however large they are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final

from sealring.engine.flight import FlightRecorder
from sealring.hooks import GroupMade
from sealring.links import setting_up
from sealring.live.status import (
    ErrorStatus,
    GroupCounts,
    GroupStatus,
    LinkSocket,
    PeerStatus,
    SocketStatus,
    Tally,
    TorchGroup,
    Waited,
    WorkerStatus,
)
from sealring.recorder.counts import ENDED
from sealring.recorder.process import counts_of_all_groups, recorders
from sealring.sealed_only.setting import may_be_required
from sealring.version import __version__

MOST_GROUPS: Final = 64
"""Groups that are shown, and names of groups that have counts of their own."""
MOST_PEERS: Final = 16
"""Peers that are shown of a group."""
MOST_WAITED: Final = 64
"""A group with more peers has one sum of its waiting."""
MOST_LINKS: Final = 16_384
MOST_TEXT: Final = 300
OTHERS: Final = "(other)"
"""In place of a group's name: all groups together that have no counts of their own."""


def worker_status(latest: GroupMade) -> WorkerStatus:
    """`latest`: the group that this process made last."""
    known = recorders()
    return WorkerStatus(
        job=latest.flight.job,
        rank=latest.flight.job_rank,
        size=latest.size,
        host=_short(latest.host),
        pid=os.getpid(),
        version=__version__,
        time_s=time.time(),
        monotonic_ns=time.monotonic_ns(),
        identity=latest.identity,
        certificate_ends_s=float(latest.certificate_ends()),
        sealed_only=may_be_required(os.environ),
        groups_open=sum(not each.closed for each in known),
        groups=[_group(each) for each in _shown(known)],
        counts=_counts(),
    )


def _shown(known: list[FlightRecorder]) -> list[FlightRecorder]:
    """The first open one, which is the default group, and the newest."""
    first = next((each for each in known if not each.closed), None)
    others = [each for each in reversed(known[-MOST_GROUPS:]) if each is not first]
    return ([first] if first is not None else []) + others[: MOST_GROUPS - 1]


def _group(recorder: FlightRecorder) -> GroupStatus:
    waited = dict(zip(recorder.members, recorder.engine_account()["waited_s"], strict=True))
    peers = {
        each.peer: PeerStatus(
            each.peer, _short(each.host), each.transport, float(waited.get(each.peer, 0.0))
        )
        for each in recorder.link_sockets()
    }
    sealed, opened = recorder.sealed_and_opened()
    return GroupStatus(
        id=recorder.group_id,
        name=_short(recorder.group),
        rank=recorder.members.index(recorder.job_rank),
        size=len(recorder.members),
        state=recorder.state,
        age_s=(time.monotonic_ns() - recorder.made_ns) / 1e9,
        sealed_bytes=sealed,
        opened_bytes=opened,
        gpu_wire=recorder.gpu_wire(),
        peers=sorted(peers.values(), key=lambda peer: -peer.waited_s)[:MOST_PEERS],
        last_error=_error(recorder),
    )


def _error(recorder: FlightRecorder) -> ErrorStatus | None:
    if (last := recorder.last_error) is None:
        return None
    text, when_ns = last
    return ErrorStatus(_short(text), (time.monotonic_ns() - when_ns) / 1e9)


@dataclass(slots=True)
class _Sum:
    sealed: int = 0
    opened: int = 0
    rekeys: int = 0
    waited: dict[int, float] = field(default_factory=dict)
    tallies: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, instrument: str, attributes: dict[str, Any], value: Any) -> None:
        match instrument:
            case "sealring.sealed":
                self.sealed += value
            case "sealring.opened":
                self.opened += value
            case "sealring.rekeys":
                self.rekeys += value
            case "sealring.wait":
                peer = attributes["sealring.peer"]
                self.waited[peer] = self.waited.get(peer, 0.0) + value
            case _:
                name = attributes.get("sealring.operation") or attributes["error.type"]
                tally = self.tallies.setdefault(instrument, {})
                tally[name] = tally.get(name, 0) + value

    def counts(self, group: str) -> GroupCounts:
        waited = {str(peer): seconds for peer, seconds in sorted(self.waited.items())}
        if len(waited) > MOST_WAITED:
            waited = {"all": sum(waited.values())}
        return GroupCounts(
            group=group,
            sealed_bytes=self.sealed,
            opened_bytes=self.opened,
            rekeys=self.rekeys,
            waited=[Waited(peer, float(seconds)) for peer, seconds in waited.items()],
            collectives=self._tally("sealring.collectives"),
            messages=self._tally("sealring.messages"),
            errors=self._tally("sealring.errors"),
        )

    def _tally(self, instrument: str) -> list[Tally]:
        return [Tally(name, count) for name, count in self.tallies.get(instrument, {}).items()]


_named: Final[dict[str, None]] = {}
"""Names with counts of their own: the first that came, for good. A counter must not fall because
another group took its place."""


def _counts() -> list[GroupCounts]:
    sums: dict[str, _Sum] = {}
    for (instrument, key), value in counts_of_all_groups().items():
        attributes = dict(key)
        name = str(attributes["sealring.group"])
        if name != ENDED and len(_named) < MOST_GROUPS:
            _named.setdefault(name)
        sums.setdefault(name if name in _named else OTHERS, _Sum()).add(
            instrument, attributes, value
        )
    return [each.counts(_short(name)) for name, each in sums.items()]


def socket_status(latest: GroupMade, without: Collection[int] = ()) -> SocketStatus:
    """`without`: sockets that end with this answer."""
    links = [
        LinkSocket(each.inode, _short(recorder.group), each.peer, each.transport)
        for recorder in recorders()
        if not recorder.closed
        for each in recorder.link_sockets()
    ]
    return SocketStatus(
        pid=os.getpid(),
        own=[inode for inode in own_sockets() if inode not in without],
        links=links[:MOST_LINKS],
        links_left_out=max(0, len(links) - MOST_LINKS),
        setting_up=setting_up.inodes(),
        store=_store(),
        torch_groups=[TorchGroup(*each) for each in latest.torch_groups()[:MOST_GROUPS]],
    )


def _store() -> str | None:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return f"{host}:{port}" if host and port else None


def own_sockets(pid: int | str = "self") -> list[int]:
    """Inodes of the sockets that a process has open."""
    folder, found = f"/proc/{pid}/fd", []
    for name in os.listdir(folder):
        try:
            target = os.readlink(f"{folder}/{name}")
        except OSError:  # closed since
            continue
        if target.startswith("socket:["):
            found.append(int(target[8:-1]))
    return sorted(found)


def _short(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 1]}…"
