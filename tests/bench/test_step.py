"""`sealring bench step`: what it prints, and that its trace shows what it claims."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sealring.bench.timeline import Span, overlap_with_backward, read_spans
from sealring.cli.bench import check_model
from sealring.errors import ConfigurationError
from tests.cli.test_commands import sealring


def evaluate(start: float, end: float) -> Span:
    return Span("autograd::engine::evaluate_function: AddmmBackward0", 1, start, end)


BACKWARD = [Span("backward", 1, 100, 200), evaluate(100, 120), evaluate(120, 150)]


@pytest.mark.parametrize(
    ("collectives", "part"),
    [
        ([(110, 140)], 1.0),
        ([(140, 160)], 0.5),  # backward waits from 150 on: that is no overlap
        ([(160, 190)], 0.0),
        ([(110, 120), (150, 180)], 0.25),
        ([], 0.0),
    ],
)
def test_overlap_counts_while_backward_computes(
    collectives: list[tuple[int, int]], part: float
) -> None:
    spans = [Span("sealring::all_reduce", 2, *times) for times in collectives]
    assert overlap_with_backward([*BACKWARD, *spans]) == part


def test_bench_step_prints_json_and_writes_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "step.json"
    done = sealring(
        "bench", "step", "--model", "gpt-demo", "--ranks", "2", "--steps", "3", "--json",
        "--trace", str(trace),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [case] = json.loads(done.stdout)["cases"]
    assert (case["model"], case["ranks"], case["parameters"]) == ("gpt-demo", 2, 832_256)
    assert case["ratio"] == pytest.approx(case["sealed_ms"] / case["gloo_ms"], rel=1e-3)
    assert case["sealed_bytes"] == 4 * case["parameters"]  # two ranks exchange halves, then sums
    spans = read_spans(trace.read_text())
    names = [span.name for span in spans]
    assert names.count("backward") == 1
    assert any(name.startswith("sealring::all_reduce (") for name in names)
    assert case["overlap"] == pytest.approx(overlap_with_backward(spans), abs=1e-3)


def test_an_unknown_model_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="'gpt-9'; there is gpt-demo, gpt-small"):
        check_model("gpt-9")
