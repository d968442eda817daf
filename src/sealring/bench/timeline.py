"""What ran when in one training step, as torch.profiler saw it on all threads of one rank."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

_COLLECTIVE = "sealring::"
_BACKWARD = "backward"
"""The range that bench/step.py puts around backward()."""


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    thread: int
    start: float
    end: float


def recorded(step: Callable[[], None], chrome_trace: Path | None = None) -> list[Span]:
    """Runs the step under the profiler; its Chrome trace goes to a file if one is named."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    # Collectives run on the group's own thread, which a profiler leaves out unless it is told.
    all_threads = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=all_threads) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = chrome_trace or Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return read_spans(path.read_text())


def read_spans(chrome_trace: str) -> list[Span]:
    """The complete events of a Chrome trace; times in microseconds."""
    return [
        Span(event["name"], event["tid"], event["ts"], event["ts"] + event["dur"])
        for event in json.loads(chrome_trace)["traceEvents"]
        if event.get("ph") == "X" and isinstance(event.get("tid"), int)
    ]


def overlap_with_backward(spans: Iterable[Span]) -> float:
    """The part of the collectives' time that lies inside backward's work on another thread.

    backward() itself ends by waiting for its last collectives: what counts is the time until the
    last gradient was computed, which is when its last operator on the other thread ended.
    """
    spans = list(spans)
    collectives = [span for span in spans if span.name.startswith(_COLLECTIVE)]
    (backward,) = [span for span in spans if span.name == _BACKWARD]
    computing_until = max(
        (
            span.end
            for span in spans
            if span.name.startswith("autograd::engine::evaluate_function")
            and backward.start <= span.start <= backward.end
        ),
        default=backward.start,
    )
    total = sum(span.end - span.start for span in collectives)
    inside = sum(
        max(0.0, min(span.end, computing_until) - max(span.start, backward.start))
        for span in collectives
    )
    return inside / total if total else 0.0
