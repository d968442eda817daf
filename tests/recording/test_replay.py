"""Parts of a run executed again: the same bits where it was honest, and others where it was not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sealring.errors import MalformedRun
from sealring.identity import load_credentials
from sealring.provenance.digests import Named
from sealring.provenance.intervals import CheckpointRef, Interval
from sealring.provenance.replay import Stretch, draw, replay, stretches
from sealring.provenance.runs import open_run
from sealring.provenance.statements import verify_statement
from sealring.vault.keys import key_file, make_key_file
from sealring.vault.vault import Vault
from tests.workers import SECRET

SCRIPT = Path(__file__).parent / "script.py"
AUTHORITIES = load_credentials(0, 2, {"SEALRING_SECRET": SECRET}).authorities


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which rank 0 changed its model in step 4, between checkpoints 2 and 3."""
    place = tmp_path_factory.mktemp("replay")
    make_key_file(place / "key")
    Vault.create(place / "vault", key_file(place / "key"), "owner")
    environ = {**os.environ, "SEALRING_SECRET": SECRET, "TEST_LIE_AT": "4"}
    command = [sys.executable, "-m", "sealring.cli", "run", "-n", "2", "--record", place / "run"]
    done = subprocess.run(
        [*map(str, command), str(SCRIPT), str(place / "vault"), str(place / "key")],
        env=environ, capture_output=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    return place


def intervals(place: Path, rank: int) -> list[Interval]:
    found = []
    for _, envelope in open_run(place / "run").statements():
        statement = verify_statement(envelope, AUTHORITIES)
        assert statement.worker is not None
        assert isinstance(statement.content, Interval)
        if statement.worker.rank == rank:
            found.append(statement.content)
    return found


def test_a_run_started_by_the_command_is_recorded_whole(recorded: Path) -> None:
    for rank in (0, 1):
        chain = intervals(recorded, rank)
        assert (chain[0].first_step, chain[-1].end_step, chain[-1].final) == (0, 6, True)
        assert chain[0].code.script.name == "script.py"
        assert sum(part.end - part.first for one in chain for part in one.data) == 6 * 8
    saved = [one for each in intervals(recorded, 0) for one in each.checkpoints_out]
    assert [(one.name, one.step) for one in saved] == [
        ("model@1", 2),
        ("model@2", 4),
        ("model@3", 6),
    ]


def test_honest_parts_come_to_the_same_bits_and_a_lie_does_not(
    recorded: Path, tmp_path: Path
) -> None:
    shutil.copytree(recorded / "vault", tmp_path / "vault")
    parts = stretches(intervals(recorded, 0))
    assert [(part.first_step, part.end.step) for part in parts] == [(0, 2), (2, 4), (4, 6)]
    arguments = [str(tmp_path / "vault"), str(recorded / "key")]
    verdicts = [
        replay(
            part, open_run(recorded / "run"), AUTHORITIES, tmp_path / f"part-{number}",
            arguments=arguments, timeout=100,
        )
        for number, part in enumerate(parts) if number != 0
    ]  # fmt: skip
    assert [(one.verdict, one.said) for one in verdicts] == [("equal", ""), ("different", "")]


def test_a_script_that_fails_or_is_not_there(recorded: Path, tmp_path: Path) -> None:
    part = replace(stretches(intervals(recorded, 0))[0], world=1)
    outcome = replay(
        part, open_run(recorded / "run"), AUTHORITIES, tmp_path / "work", arguments=["/no/vault"]
    )
    assert outcome.verdict == "failed"
    assert outcome.said
    missing = Stretch(2, Named("script.py", "00" * 32), None, part.end)
    with pytest.raises(MalformedRun, match="no copy of script"):
        replay(missing, open_run(recorded / "run"), AUTHORITIES, tmp_path / "other")


def test_what_is_drawn_depends_on_the_seed_alone() -> None:
    def saved(step: int) -> CheckpointRef:
        return CheckpointRef(f"model@{step}", step, "aa" * 32, "bb" * 32)

    parts = [Stretch(1, Named("s", "00" * 32), saved(step), saved(step + 1)) for step in range(50)]
    drawn = draw(parts, 5, b"seed")
    assert drawn == draw(parts, 5, b"seed")
    assert drawn == sorted(drawn, key=lambda part: part.first_step)
    assert len({part.first_step for part in drawn}) == 5
    assert drawn != draw(parts, 5, b"other")
    assert draw(parts, 99, b"seed") == parts
    everything: set[Any] = set()
    for number in range(100):
        everything |= {part.first_step for part in draw(parts, 5, bytes([number]))}
    assert len(everything) == 50
