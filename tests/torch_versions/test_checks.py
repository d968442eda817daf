"""The checks of `make torch-versions`, with the torch that is installed here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from tools import torch_versions


@pytest.mark.timeout(300)
def test_all_checks_pass_with_the_installed_torch() -> None:
    outcomes = torch_versions.run_checks(Path(sys.executable))
    assert len(outcomes) > 10
    assert {name: str(each) for name, each in outcomes.items() if each.status == "failed"} == {}


@pytest.mark.timeout(300)
def test_a_check_that_fails_is_named_with_the_last_line_of_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "checks.py"
    script.write_text(
        "import json, os, sys\n"
        "from pathlib import Path\n"
        "CHECKS = {'ends': 0, 'fails': 0, 'works': 0}\n"
        "if __name__ == '__main__':\n"
        "    rank = int(os.environ['RANK'])\n"
        "    for check in sys.argv[2:]:\n"
        "        if check == 'ends' and rank == 1:\n"
        "            sys.exit('the last line')\n"
        "        failed = check == 'fails' and rank == 2\n"
        "        text = 'ValueError: no' if failed else ''\n"
        "        found = {'status': 'failed' if failed else 'ok', 'text': text}\n"
        "        Path(sys.argv[1], f'{check}.{rank}.json').write_text(json.dumps(found))\n"
    )
    monkeypatch.setattr(torch_versions, "CHECKS", script)
    outcomes = torch_versions.run_checks(Path(sys.executable))
    assert {name: each.status for name, each in outcomes.items()} == {
        "ends": "failed", "fails": "failed", "works": "ok",
    }  # fmt: skip
    assert outcomes["fails"].text == "ValueError: no"
    result = torch_versions.Tested("2.99.0", allowed=True, checks=outcomes)
    assert not result.passed
    assert "| fails | failed: ValueError: no |" in torch_versions.table([result])


@pytest.mark.skipif(importlib.util.find_spec("torchft") is not None, reason="torchft is here")
def test_the_script_that_trains_with_torchft_is_found(tmp_path: Path) -> None:
    # This interpreter's pip installs nothing, so the script gets as far as its first import.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$2" = pip ] || exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    outcome = torch_versions.run_torchft(python, "torchft")
    assert str(outcome) == "failed: ModuleNotFoundError: No module named 'torchft'"
