"""`sealring bench step`: what it prints, keeps and draws."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sealring.lab.results import read_results
from tests.cli.test_commands import sealring


@pytest.mark.timeout(300)  # wall time, on a machine that may be busy
def test_a_step_by_every_variant_with_its_trace_and_results(tmp_path: Path) -> None:
    trace, kept = tmp_path / "step.json", tmp_path / "results.json"
    done = sealring(
        "bench", "step", "--model", "gpt-demo", "--ranks", "2", "--steps", "3", "--json",
        "--variants", "compute,plain,sealed,cc", "--bucket-cap-mb", "1", "--batch", "1",
        "--trace", str(trace), "--results", str(kept),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [case] = json.loads(done.stdout)["cases"]
    assert (case["bucket_cap_mb"], case["all_reduces"]) == (1.0, 4)
    assert (case["model"], case["ranks"], case["parameters"]) == ("gpt-demo", 2, 832_256)
    assert (case["batch"], case["tokens"]) == (1, 64)
    assert case["sealed_bytes"] == 832_256 * 4  # two ranks: each seals half, then half again
    assert 0 <= case["overlap"] <= 1
    if case["ratio"] is None:
        assert case["noise"] > 0.05
    else:
        assert case["ratio"] == pytest.approx(case["sealed_ms"] / case["gloo_ms"], rel=1e-2)
    names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
    assert names.count("backward") >= 1
    assert any(name.startswith("sealring::all_reduce (") for name in names)

    results = read_results(kept)
    assert results.complete
    assert [(c.variant, c.ranks, c.bucket_cap_mb, c.run) for c in results.step] == [
        ("compute", 1, 0.0, 0),
        ("compute", 2, 0.0, 1), ("plain", 2, 1.0, 1), ("sealed", 2, 1.0, 1), ("cc", 2, 1.0, 1),
    ]  # fmt: skip
    assert all(len(case.seconds) == 3 for case in results.step)
    alone, sealed, cc = results.step[0], results.step[3], results.step[4]
    assert [part.name for part in alone.split] == ["forward", "backward", "optimizer"]
    for case in (sealed, cc):
        parts = {part.name: part.exposed_s + part.hidden_s for part in case.split}
        assert all(parts[name] > 0 for name in ("compute", "seal", "transfer", "open", "reduce"))
    collectives = [span for span in sealed.timeline if span.lane == "collective"]
    assert len(collectives) == 4
    assert sum(span.bytes for span in collectives) == 832_256 * 4
