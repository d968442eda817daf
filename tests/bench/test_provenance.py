"""The benchmark of audits, with a small run: every figure is there, and nothing is left behind."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from sealring.bench.audit import BROWSERS
from sealring.cli import app


def test_every_figure_is_measured_and_nothing_is_left_behind(tmp_path: Path) -> None:
    arguments = ["bench", "provenance", "--ranks", "2", "--intervals", "3"]
    arguments += ["--folder", str(tmp_path)]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    found = json.loads(done.stdout)["audit"]
    assert (found["ranks"], found["intervals"], found["statements"]) == (2, 3, 6)
    assert all(value is None or value > 0 for value in found.values())
    assert list(tmp_path.iterdir()) == []
    assert "chromium" in BROWSERS
    assert "an audit of 6 statements" in CliRunner().invoke(app, arguments).stdout.lower()
