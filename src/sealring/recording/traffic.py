"""Groups, collectives and links of this process, as statements have them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sealring.engine.endpoint import LinkTraffic
from sealring.provenance.intervals import (
    CollectiveCount,
    Commitment,
    GroupEpoch,
    LinkAccount,
    LinkKind,
)
from sealring.recorder import process
from sealring.recorder.flight import FlightRecorder


@dataclass(slots=True)
class Traffic:
    groups: list[GroupEpoch] = field(default_factory=list)
    collectives: list[CollectiveCount] = field(default_factory=list)
    links: list[LinkAccount] = field(default_factory=list)


def traffic_so_far() -> Traffic:
    """Of all groups of this process, but for those that ended before an earlier call."""
    found = Traffic()
    for recorder in process.recorders():
        if recorder.reported:
            continue
        # Asked for first: what ends after this is reported again.
        ended = recorder.closed
        _add(found, recorder)
        recorder.reported = ended
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
