"""Counts of what was sealed, through OpenTelemetry's API where it is installed.

The API alone does nothing until the script, or its agent, sets up a MeterProvider; it may do so
before or after the group is made. The instruments are read when an exporter asks: a collective
pays nothing for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from sealring.recorder.counts import INSTRUMENTS
from sealring.recorder.process import counts_of_all_groups

try:
    # With this module, before ranks meet: when a group forms, all of them would wait for it.
    from opentelemetry import metrics
except ImportError:
    metrics = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Observation

_published = False


def publish_metrics() -> bool:
    """Makes the instruments, once per process. False where OpenTelemetry is not installed."""
    global _published
    if metrics is None:
        return False
    if _published:
        return True
    _published = True
    from sealring.version import __version__

    meter = metrics.get_meter("sealring", __version__)
    for name, unit, description, _ in INSTRUMENTS:
        meter.create_observable_counter(name, [_observing(name)], unit, description)
    return True


def _observing(name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observe(_: CallbackOptions) -> Iterable[Observation]:
        from opentelemetry.metrics import Observation

        counts = counts_of_all_groups().items()
        return [Observation(value, dict(key)) for (one, key), value in counts if one == name]

    return observe
