"""What happened since the last statement.

Data, checkpoints and privacy are kept in the order in which they were reported. Groups, collectives
and links come from the flight recorders.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from sealring.core.engine.endpoint import LinkTraffic
from sealring.core.engine.flight import FlightRecorder
from sealring.record.statements.forms import (
    CheckpointRef,
    CollectiveCount,
    Commitment,
    DataRange,
    GroupEpoch,
    LinkAccount,
    LinkKind,
    Privacy,
)

# ---- reported


@dataclass(slots=True)
class Noted:
    data: list[DataRange] = field(default_factory=list)
    checkpoints_in: list[CheckpointRef] = field(default_factory=list)
    checkpoints_out: list[CheckpointRef] = field(default_factory=list)


OPENED: dict[tuple[str, str], None] = {}
"""The name and digest of each dataset that this process has opened, even before a recording."""


def opened(name: str, digest: str) -> DataRange:
    """Notes an opened dataset, of which any sample can be read: a range without positions."""
    OPENED[name, digest] = None
    return DataRange(name, digest, 0, 0, 0, None, None)


def opened_so_far() -> list[DataRange]:
    """The datasets that were opened so far: a script may open them before its recording begins."""
    return [opened(*each) for each in list(OPENED)]


class Notes:
    """What any thread reports, until the thread that makes a statement takes it."""

    def __init__(self, data: Sequence[DataRange] = ()) -> None:
        self._lock = threading.Lock()
        self._noted = Noted(list(data))
        self.privacy: Privacy | None = None

    def data(self, read: DataRange) -> None:
        """Notes a range. Adjacent ranges are joined: a statement must not grow with its steps."""
        with self._lock:
            known = self._noted.data
            for index in range(len(known) - 1, -1, -1):
                last = known[index]
                if replace(last, first=read.first, end=read.end) == read and last.end == read.first:
                    known[index] = replace(last, end=read.end)
                    return
            known.append(read)

    def checkpoint_in(self, checkpoint: CheckpointRef) -> None:
        with self._lock:
            self._noted.checkpoints_in.append(checkpoint)

    def checkpoint_out(self, checkpoint: CheckpointRef) -> None:
        with self._lock:
            self._noted.checkpoints_out.append(checkpoint)

    def resumed_at(self, step: int) -> list[CheckpointRef]:
        """Takes out the checkpoints that were read. The run goes on from them at `step`."""
        with self._lock:
            read = [replace(one, step=step) for one in self._noted.checkpoints_in]
            self._noted.checkpoints_in = []
            return read

    def any(self) -> bool:
        with self._lock:
            return self._noted != Noted()

    def take(self) -> Noted:
        with self._lock:
            noted, self._noted = self._noted, Noted()
            return noted


# ---- counted


@dataclass(slots=True)
class Traffic:
    groups: list[GroupEpoch] = field(default_factory=list)
    collectives: list[CollectiveCount] = field(default_factory=list)
    links: list[LinkAccount] = field(default_factory=list)


KEPT_CLOSED: Final = 8
"""The most groups in the first statement that ended before the recording began."""

_lock = threading.Lock()
_groups: list[FlightRecorder] = []
"""The groups that exist or ended since the last statement, oldest first."""


def _forget_all() -> None:
    """Forgets all groups, in a forked child: they are the parent's."""
    global _lock
    _lock = threading.Lock()
    _groups.clear()


os.register_at_fork(after_in_child=_forget_all)


def note_group(flight: FlightRecorder, *, recorded: bool) -> None:
    """Called for each new group. If nothing is recorded, old groups are dropped."""
    with _lock:
        if flight in _groups:
            return
        closed = [] if recorded else [each for each in _groups if each.closed]
        for old in closed[:-KEPT_CLOSED]:
            _groups.remove(old)
        _groups.append(flight)


def traffic_so_far() -> Traffic:
    """The traffic of all groups of this process, except those that ended before an earlier call."""
    found = Traffic()
    with _lock:
        known = list(_groups)
    for flight in known:
        # Read first: a group that ends after this is reported again next time.
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
