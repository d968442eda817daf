"""Groups, collectives and links of this process, as statements have them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from sealring.core.engine.endpoint import LinkTraffic
from sealring.core.engine.flight import FlightRecorder
from sealring.record.provenance.intervals import (
    CollectiveCount,
    Commitment,
    GroupEpoch,
    LinkAccount,
    LinkKind,
)


@dataclass(slots=True)
class Traffic:
    groups: list[GroupEpoch] = field(default_factory=list)
    collectives: list[CollectiveCount] = field(default_factory=list)
    links: list[LinkAccount] = field(default_factory=list)


KEPT_CLOSED: Final = 8
"""Groups that ended before the recording began, and still are in its first statement."""

_lock = threading.Lock()
_groups: list[FlightRecorder] = []
"""Those that exist, and those that ended since the last statement; the oldest first."""


def _forget_all() -> None:
    """A forked child has no part in its parent's groups."""
    global _lock
    _lock = threading.Lock()
    _groups.clear()


os.register_at_fork(after_in_child=_forget_all)


def note_group(flight: FlightRecorder, *, recorded: bool) -> None:
    """Called once for each group. Where nothing is recorded, old ones are dropped."""
    with _lock:
        closed = [] if recorded else [each for each in _groups if each.closed]
        for old in closed[:-KEPT_CLOSED]:
            _groups.remove(old)
        _groups.append(flight)


def traffic_so_far() -> Traffic:
    """Of all groups of this process, but for those that ended before an earlier call."""
    found = Traffic()
    with _lock:
        known = list(_groups)
    for flight in known:
        # Asked for first: what ends after this is reported again.
        ended = flight.closed
        _add(found, flight)
        with _lock:
            if ended and flight in _groups:
                _groups.remove(flight)
    return found


def _add(found: Traffic, recorder: FlightRecorder) -> None:
    name, epoch = recorder.group, recorder.epoch
    found.groups.append(GroupEpoch(name, epoch, list(recorder.members), recorder.state))
    found.collectives += [
        CollectiveCount(name, epoch, operation.name.lower(), count)
        for operation, count in sorted(recorder.finished.copy().items())
    ]
    found.links += _links(recorder, "collective", recorder.commitments())
    found.links += _links(recorder, "message", recorder.mail.commitments())


def _links(
    recorder: FlightRecorder, kind: LinkKind, traffic: Iterable[LinkTraffic]
) -> Iterator[LinkAccount]:
    for link in sorted(traffic):
        sent, received = _commitment(link.sent), _commitment(link.received)
        silent = sent is not None and received is not None and not sent.records + received.records
        if not silent:
            peer = recorder.members[link.peer]
            yield LinkAccount(recorder.group, recorder.epoch, peer, kind, sent, received)


def _commitment(value: tuple[int, bytes] | None) -> Commitment | None:
    return None if value is None else Commitment(value[0], value[1].hex())
