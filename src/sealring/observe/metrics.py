"""What a worker counts: one table with the names, units and texts for every export.

All exports read `process.counts_of_all_groups()`: OpenTelemetry (below), `sealring top`,
OpenMetrics (exporter), and the figures for loggers (integrations). Collectives do no extra work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeVar

from sealring.core.engine.flight import FlightRecorder
from sealring.version import __version__

try:
    # Imported with this module, before ranks meet. Later, a whole forming group would wait for it.
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
    """OpenTelemetry's unit. One in braces says what is counted, and no other name uses it."""
    text: str
    read: Callable[[Source], Iterable[tuple[Any, float]]]
    """Gives labels and values. A counter's label is `attribute`'s value; gauges have several."""
    attribute: str = ""
    """The label's name in OpenTelemetry. Its last part is the name in OpenMetrics."""
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
    """The metric's plain name."""
    job: str
    rank: int
    group: str
    label: Label


Counts = dict[Series, float]

KEPT_NAMES: Final = 256
"""The most names of ended groups that have counts of their own."""
ENDED: Final = "(ended)"
"""The name for all older ended groups together, so that sums over all names stay right."""


def counts_of(recorder: FlightRecorder) -> Counts:
    place = (recorder.job, recorder.job_rank, recorder.group)
    return {
        Series(metric.plain_name, *place, label): value
        for metric in COUNTERS
        for label, value in metric.read(recorder)
    }


def total_of(parts: Iterable[Counts]) -> Counts:
    """Adds counts. Groups with the same name count as one, because a counter must not fall."""
    total: Counts = {}
    for part in parts:
        for series, value in part.items():
            total[series] = total.get(series, 0) + value
    return total


class EndedGroups:
    """The counts of ended groups. Nothing else is kept: a job may make any number of groups."""

    def __init__(self) -> None:
        self._by_name: dict[str, Counts] = {}
        self._older: Counts = {}

    def add(self, recorder: FlightRecorder) -> None:
        # Taken out and put back, so that the names stay in the order of their last use.
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
    """Makes OpenTelemetry's instruments, once per process. False if it is not installed.

    Its API does nothing until the script or its agent sets up a MeterProvider, before or after the
    group is made.
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
