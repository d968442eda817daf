"""A small run of the benchmark of statements and audits gives every figure."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from sealring.lab.__main__ import app
from sealring.lab.bench.records import BAR

SMALL = ["--model", "mlp", "--batch", "2", "--every", "2", "--blocks", "2", "--audits", "2x3"]


def test_every_figure_is_measured_and_nothing_is_left_behind(tmp_path: Path) -> None:
    arguments = ["provenance", *SMALL, "--folder", str(tmp_path), "--json"]
    done = CliRunner().invoke(app, arguments)
    rows = {row["what"]: row for row in json.loads(done.stdout)["rows"]}
    found = {what: row["value"] for what, row in rows.items()}
    # Each rank has a warm-up, two timed blocks and a final statement.
    assert found["statements"] == 2 * 4
    assert 1000 < found["of a rank and interval"] < 20_000
    on_disk = found["statements, log and evidence"]
    assert on_disk > found["statements"] * found["of a rank and interval"]
    assert rows["ratio"]["at_most"] == BAR
    assert found["2 ranks, 3 intervals: statements"] == 6
    assert all(value > 0 for value in found.values())
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_size_of_a_run_is_refused() -> None:
    done = CliRunner().invoke(app, ["provenance", "--audits", "1x5"])
    assert done.exit_code != 0
    assert "'1x5' is no size of a run: write ranks x intervals" in str(done.exception)
