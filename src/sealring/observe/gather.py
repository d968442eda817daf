"""The status of this process, from its flight recorders.

It is bounded, however many groups there are and however large they are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from typing import Final

from sealring.core.engine.flight import FlightRecorder
from sealring.core.hooks import GroupMade
from sealring.core.links import setting_up
from sealring.core.sealed_only.setting import may_be_required
from sealring.observe.metrics import ENDED
from sealring.observe.process import counts_of_all_groups, recorders
from sealring.observe.status import (
    Count,
    ErrorStatus,
    GroupStatus,
    PeerStatus,
    SocketStatus,
    StatusSocket,
    TorchGroup,
    WorkerStatus,
)
from sealring.version import __version__

MOST_GROUPS: Final = 64
"""The most groups that are shown, and the most group names that have counts of their own."""
MOST_PEERS: Final = 16
"""The most peers that are shown for a group."""
MOST_LABELS: Final = 64
"""The most labels of a count. A count with more, as by peer in a large group, is one sum."""
MOST_LINKS: Final = 16_384
MOST_TEXT: Final = 300
OTHERS: Final = "(other)"
"""The name for all groups together that have no counts of their own."""


def worker_status(latest: GroupMade) -> WorkerStatus:
    """This worker's status. `latest`: the group that this process made last."""
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
    """The groups to show: the first open one, which is the default group, and the newest."""
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


_named: Final[dict[str, None]] = {}
"""The names with counts of their own: the first ones, for good. If a later group took such a place,
its counter would fall."""


def _counts() -> list[Count]:
    sums: dict[tuple[str, str], dict[str, float]] = {}
    for series, value in counts_of_all_groups().items():
        if series.group != ENDED and len(_named) < MOST_GROUPS:
            _named.setdefault(series.group)
        group = _short(series.group) if series.group in _named else OTHERS
        labels, label = sums.setdefault((group, series.metric), {}), str(series.label)
        labels[label] = labels.get(label, 0.0) + value
    return [
        Count(metric, group, label, value)
        for (group, metric), labels in sums.items()
        for label, value in _bounded(labels).items()
    ]


def _bounded(labels: dict[str, float]) -> dict[str, float]:
    return labels if len(labels) <= MOST_LABELS else {"all": sum(labels.values())}


def socket_status(latest: GroupMade, without: Collection[int] = ()) -> SocketStatus:
    """The sockets of this process. `without`: sockets that are closed after this answer."""
    links = [
        StatusSocket(each.inode, _short(recorder.group), each.peer, each.transport)
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
        except OSError:  # closed in the meantime
            continue
        if target.startswith("socket:["):
            found.append(int(target[8:-1]))
    return sorted(found)


def _short(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 1]}…"
