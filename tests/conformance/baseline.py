"""What Gloo makes of the same cases on the same machine, kept between runs of the command."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import torch

from tests.conformance.outcome import Outcome
from tests.conformance.run import ROOT

FILE = ROOT / "build" / "conformance" / "gloo.json"


def _this_machine() -> list[str]:
    return [platform.node(), platform.machine(), platform.python_version(), torch.__version__]


def kept(path: Path = FILE) -> dict[str, Outcome]:
    """Empty where there is none, or where it is another machine's or another torch's."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if content.get("machine") != _this_machine():
        return {}
    return {value["case"]: Outcome.from_json(value) for value in content["outcomes"]}


def keep(outcomes: dict[str, Outcome], path: Path = FILE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = [outcome.as_json() for outcome in outcomes.values()]
    path.write_text(json.dumps({"machine": _this_machine(), "outcomes": values}))
