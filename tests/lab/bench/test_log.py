"""A small run of the benchmark of logs gives every figure, each above zero."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from sealring.lab.__main__ import app


def test_every_figure_is_measured_and_nothing_is_left_behind(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["log", "--entries", "300", "--folder", str(tmp_path), "--json"])
    found = {row["what"]: row["value"] for row in json.loads(done.stdout)["rows"]}
    assert found["entries of 200 bytes"] == 300 + 50 * 256 + 50
    assert len(found) == 12
    assert all(value > 0 for value in found.values())
    assert list(tmp_path.iterdir()) == []
    shown = CliRunner().invoke(app, ["log", "--entries", "300", "--folder", str(tmp_path)])
    assert "commits of one entry" in shown.stdout
