"""What a worker counts: one table, which gives every export its names, units and texts.

`process.counts_of_all_groups()` is read by all of them: OpenTelemetry (below), `sealring top` and
OpenMetrics (live), and the figures for loggers (integrations). A collective pays nothing for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeVar

from sealring.core.engine.flight import FlightRecorder
from sealring.version import __version__

try:
    # With this module, before ranks meet: when a group forms, all of them would wait for it.
    from opentelemetry import metrics
except ImportError:
    metrics = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Observation

Source = TypeVar("Source")
Label = str | int
_UNITS: Final = {"By": "_bytes", "s": "_seconds"}


@dataclass(frozen=True, slots=True)
class Metric(Generic[Source]):
    """`sealring.NAME` with its unit in OpenTelemetry, `sealring_NAME_UNIT` in OpenMetrics."""

    name: str
    unit: str
    """As OpenTelemetry writes it; one in braces says what is counted, and is in no other name."""
    text: str
    read: Callable[[Source], Iterable[tuple[Any, float]]]
    """Labels and values: a counter's label is the value of `attribute`, a gauge has several."""
    attribute: str = ""
    """As OpenTelemetry names it; its last part is the label's name in OpenMetrics."""
    kind: Literal["counter", "gauge", "info"] = "counter"

    @property
    def plain_name(self) -> str:
        return self.name + _UNITS.get(self.unit, "")


def _waited(recorder: FlightRecorder) -> Iterable[tuple[Label, float]]:
    for peer, seconds in zip(recorder.members, recorder.engine_account()["waited_s"], strict=True):
        if peer != recorder.job_rank:
            yield peer, seconds


COUNTERS: Final[tuple[Metric[FlightRecorder], ...]] = (
    Metric("sealed", "By", "Plaintext bytes that this rank sealed.",
           lambda of: [("", of.sealed_and_opened()[0])]),
    Metric("opened", "By", "Plaintext bytes that this rank opened and verified.",
           lambda of: [("", of.sealed_and_opened()[1])]),
    Metric("rekeys", "{rekey}", "How often this rank replaced a sealing key.",
           lambda of: [("", sum(of.engine_account()["rekeys"]))]),
    Metric("wait", "s", "Time slept while this peer owed a record.", _waited, "sealring.peer"),
    Metric("collectives", "{collective}", "Collectives that went well.",
           lambda of: [(each.name.lower(), count) for each, count in of.finished.copy().items()],
           "sealring.operation"),
    Metric("messages", "{message}", "Messages that went well.",
           lambda of: of.mail.finished.copy().items(), "sealring.operation"),
    Metric("errors", "{error}", "Calls that ended in an error.",
           lambda of: of.failed.copy().items(), "error.type"),
)  # fmt: skip


class Series(NamedTuple):
    metric: str
    """Its plain name."""
    job: str
    rank: int
    group: str
    label: Label


Counts = dict[Series, float]

KEPT_NAMES: Final = 256
"""Names of ended groups that have counts of their own."""
ENDED: Final = "(ended)"
"""In place of a group's name: all older groups together. Sums over all names stay true."""


def counts_of(recorder: FlightRecorder) -> Counts:
    place = (recorder.job, recorder.job_rank, recorder.group)
    return {
        Series(metric.plain_name, *place, label): value
        for metric in COUNTERS
        for label, value in metric.read(recorder)
    }


def total_of(parts: Iterable[Counts]) -> Counts:
    """Groups of one name, one after the other, count as one: a counter must not fall."""
    total: Counts = {}
    for part in parts:
        for series, value in part.items():
            total[series] = total.get(series, 0) + value
    return total


class EndedGroups:
    """A job may make groups without end, so an old group leaves only its counts behind."""

    def __init__(self) -> None:
        self._by_name: dict[str, Counts] = {}
        self._older: Counts = {}

    def add(self, recorder: FlightRecorder) -> None:
        # Taken out and put in again, so that the names are in the order of their last use.
        known = self._by_name.pop(recorder.group, {})
        self._by_name[recorder.group] = total_of([known, counts_of(recorder)])
        if len(self._by_name) > KEPT_NAMES:
            oldest = self._by_name.pop(next(iter(self._by_name)))
            renamed = [{each._replace(group=ENDED): value} for each, value in oldest.items()]
            self._older = total_of([self._older, *renamed])

    def parts(self) -> list[Counts]:
        return [self._older, *self._by_name.values()]


_published = False


def publish_metrics(counts: Callable[[], Counts]) -> bool:
    """Makes OpenTelemetry's instruments, once per process. False where it is not installed.

    Its API alone does nothing until the script, or its agent, sets up a MeterProvider; it may do so
    before or after the group is made.
    """
    global _published
    if metrics is None:
        return False
    if not _published:
        _published = True
        meter = metrics.get_meter("sealring", __version__)
        for each in COUNTERS:
            meter.create_observable_counter(
                f"sealring.{each.name}", [_observing(each, counts)], each.unit, each.text
            )
    return True


def _observing(
    metric: Metric[FlightRecorder], counts: Callable[[], Counts]
) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observe(_: CallbackOptions) -> Iterable[Observation]:
        from opentelemetry.metrics import Observation

        for series, value in counts().items():
            if series.metric == metric.plain_name:
                attributes: dict[str, Label] = {
                    "sealring.job": series.job,
                    "sealring.rank": series.rank,
                    "sealring.group": series.group,
                }
                if metric.attribute:
                    attributes[metric.attribute] = series.label
                yield Observation(value, attributes)

    return observe
