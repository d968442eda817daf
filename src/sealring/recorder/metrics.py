"""Counts of what was sealed, through OpenTelemetry's API where it is installed.

The API alone does nothing until the script, or its agent, sets up a MeterProvider; it may do so
before or after the group is made. The instruments are read when an exporter asks: a collective
pays nothing for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from sealring.recorder.flight import FlightRecorder
from sealring.recorder.process import recorders

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Observation

Value = int | float
Attributes = Mapping[str, str | int]

_published = False


def publish_metrics() -> bool:
    """Makes the instruments, once per process. False where OpenTelemetry is not installed."""
    global _published
    try:
        from opentelemetry import metrics
    except ImportError:
        return False
    if _published:
        return True
    _published = True
    from sealring.version import __version__

    meter = metrics.get_meter("sealring", __version__)
    for name, unit, description, read in INSTRUMENTS:
        meter.create_observable_counter(name, [_observing(read)], unit, description)
    return True


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


def _observing(read: Reader) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observe(_: CallbackOptions) -> Iterable[Observation]:
        from opentelemetry.metrics import Observation

        # A counter must not fall: groups of one name, one after the other, count as one.
        totals: defaultdict[frozenset[tuple[str, str | int]], Value] = defaultdict(int)
        for recorder in recorders():
            common: dict[str, str | int] = {
                "sealring.job": recorder.job,
                "sealring.rank": recorder.job_rank,
                "sealring.group": recorder.group,
            }
            for value, attributes in read(recorder):
                totals[frozenset({**common, **attributes}.items())] += value
        return [Observation(value, dict(key)) for key, value in totals.items()]

    return observe
