"""tools/run_tests.py leaves out no test file and loses no failure."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tools.run_tests import LOGS, ROOT, Part, Running
from tools.run_tests import test_parts as parts_of_the_suite


def test_every_test_file_is_in_one_part() -> None:
    chosen = [name for part in parts_of_the_suite() for name in part.command[3:]]
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(chosen) == len(set(chosen))
    assert set(chosen) == there


def test_a_part_that_fails_is_printed_whole(capfd: pytest.CaptureFixture[str]) -> None:
    LOGS.mkdir(parents=True, exist_ok=True)
    says = "import sys; print('the first line'); print('the last line'); sys.exit(int(sys.argv[1]))"
    parts = [
        Part(name, [sys.executable, "-c", says, status], 1.0)
        for name, status in (("a try that passes", "0"), ("a try that fails", "3"))
    ]
    try:
        assert Running(parts, 2).run() == 1
    finally:
        for log in Path(LOGS).glob("a-try-that-*.log"):
            log.unlink()
    told = capfd.readouterr().out
    assert told.count("the first line") == 1  # only the part that failed
    assert "1 of 2 parts passed" in told


def test_each_part_has_a_folder_of_its_own(tmp_path: Path) -> None:
    LOGS.mkdir(parents=True, exist_ok=True)
    says = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"
    parts = [
        Part(f"a try, {name}", [sys.executable, "-c", says, str(tmp_path / name)], 1.0, pytest=True)
        for name in "ab"
    ]
    try:
        assert Running(parts, 2).run() == 0
    finally:
        for log in Path(LOGS).glob("a-try,-*.log"):
            log.unlink()
    folders = [(tmp_path / name).read_text().removeprefix("--basetemp=") for name in "ab"]
    assert len(set(folders)) == 2
    assert all(Path(folder).is_absolute() for folder in folders)
    assert not any(Path(folder).exists() for folder in folders)
