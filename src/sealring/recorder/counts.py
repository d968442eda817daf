"""Counts of the groups of a process: of those that exist, and the sums of those that ended.

A job may make groups without end, so an old group leaves only its counts behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from sealring.engine.flight import FlightRecorder

Value = int | float
Attributes = Mapping[str, str | int]
Series = tuple[str, frozenset[tuple[str, str | int]]]
"""An instrument's name, and the attributes of one of its values."""

Counts = dict[Series, Value]

KEPT_NAMES: Final = 256
"""Names of ended groups that have counts of their own."""
ENDED: Final = "(ended)"
"""In place of a group's name: all older groups together. Sums over all names stay true."""


def _sealed(recorder: FlightRecorder) -> Iterable[tuple[Value, Attributes]]:
    yield recorder.sealed_and_opened()[0], {}


def _opened(recorder: FlightRecorder) -> Iterable[tuple[Value, Attributes]]:
    yield recorder.sealed_and_opened()[1], {}


def _rekeys(recorder: FlightRecorder) -> Iterable[tuple[Value, Attributes]]:
    yield sum(recorder.engine_account()["rekeys"]), {}


def _waited(recorder: FlightRecorder) -> Iterable[tuple[Value, Attributes]]:
    for peer, seconds in zip(recorder.members, recorder.engine_account()["waited_s"], strict=True):
        if peer != recorder.job_rank:
            yield seconds, {"sealring.peer": peer}


def _collectives(recorder: FlightRecorder) -> Iterable[tuple[Value, Attributes]]:
    for operation, count in recorder.finished.copy().items():
        yield count, {"sealring.operation": operation.name.lower()}


def _messages(recorder: FlightRecorder) -> Iterable[tuple[Value, Attributes]]:
    for way, count in recorder.mail.finished.copy().items():
        yield count, {"sealring.operation": way}


def _errors(recorder: FlightRecorder) -> Iterable[tuple[Value, Attributes]]:
    for error, count in recorder.failed.copy().items():
        yield count, {"error.type": error}


Reader = Callable[[FlightRecorder], Iterable[tuple[Value, Attributes]]]
INSTRUMENTS: tuple[tuple[str, str, str, Reader], ...] = (
    ("sealring.sealed", "By", "Plaintext bytes that this rank sealed.", _sealed),
    ("sealring.opened", "By", "Plaintext bytes that this rank opened and verified.", _opened),
    ("sealring.rekeys", "{rekey}", "How often this rank replaced a sealing key.", _rekeys),
    ("sealring.wait", "s", "Time slept while this peer owed a record.", _waited),
    ("sealring.collectives", "{collective}", "Collectives that went well.", _collectives),
    ("sealring.messages", "{message}", "Messages that went well.", _messages),
    ("sealring.errors", "{error}", "Calls that ended in an error.", _errors),
)


def counts_of(recorder: FlightRecorder) -> Counts:
    common: dict[str, str | int] = {
        "sealring.job": recorder.job,
        "sealring.rank": recorder.job_rank,
        "sealring.group": recorder.group,
    }
    return {
        (name, frozenset({**common, **attributes}.items())): value
        for name, _, _, read in INSTRUMENTS
        for value, attributes in read(recorder)
    }


def total_of(parts: Iterable[Counts]) -> Counts:
    """Groups of one name, one after the other, count as one: a counter must not fall."""
    total: Counts = {}
    for part in parts:
        for series, value in part.items():
            total[series] = total.get(series, 0) + value
    return total


class EndedGroups:
    def __init__(self) -> None:
        self._by_name: dict[str, Counts] = {}
        self._older: Counts = {}

    def add(self, recorder: FlightRecorder) -> None:
        # Taken out and put in again, so that the names are in the order of their last use.
        known = self._by_name.pop(recorder.group, {})
        self._by_name[recorder.group] = total_of([known, counts_of(recorder)])
        if len(self._by_name) > KEPT_NAMES:
            oldest = self._by_name.pop(next(iter(self._by_name)))
            self._older = total_of([self._older, _without_name(oldest)])

    def parts(self) -> list[Counts]:
        return [self._older, *self._by_name.values()]


def _without_name(counts: Counts) -> Counts:
    return {
        (instrument, frozenset({**dict(attributes), "sealring.group": ENDED}.items())): value
        for (instrument, attributes), value in counts.items()
    }
