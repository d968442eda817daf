"""Parts of a run are executed again. Honest parts give the same bits, and others do not."""

from __future__ import annotations

import math
import os
import secrets
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from sealring.core.identity import load_credentials
from sealring.record import replay as replaying
from sealring.record.replay import (
    Compare,
    Difference,
    Outcome,
    Repeated,
    Stretch,
    draw,
    execute,
    replay,
    stretches,
)
from sealring.record.statements.forms import CheckpointRef, Interval, Named
from sealring.record.statements.run_folder import open_run
from sealring.record.statements.signing import verify_statement
from sealring.vault.checkpoint_difference import NamedCheckpoint, largest_difference
from sealring.vault.keys import key_file, make_key_file
from sealring.vault.vault import Vault
from tests.workers import SECRET

SCRIPT = Path(__file__).parent / "script.py"
pytestmark = pytest.mark.timeout(300)
AUTHORITIES = load_credentials(0, 2, {"SEALRING_SECRET": SECRET}).authorities


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record a run in which rank 0 changed its model in step 4, between checkpoints 2 and 3."""
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


def stated(place: Path) -> dict[int, list[Interval]]:
    return {rank: intervals(place, rank) for rank in (0, 1)}


@dataclass(frozen=True)
class Again:
    """Two parts executed again: steps 2 to 4, which are honest, and 4 to 6, which are not."""

    honest: Outcome
    lie: Outcome
    records: Path
    """The records that repeating the honest part made."""
    compare: Compare
    """Compares with the vault that the parts were saved to."""


@pytest.fixture(scope="module")
def again(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Again:
    place = tmp_path_factory.mktemp("again")
    vault = place / "vault"
    shutil.copytree(recorded / "vault", vault)
    run, key = open_run(recorded / "run"), recorded / "key"

    def compare(one: CheckpointRef, other: Repeated) -> Difference:
        opened = Vault.open(vault, key_file(key))
        again = other.checkpoint
        found = largest_difference(
            opened,
            NamedCheckpoint(one.name, one.sha256, one.content, AUTHORITIES, run.head.job),
            NamedCheckpoint(again.name, again.sha256, again.content, other.authorities, other.job),
        )
        return Difference(*found)

    with pytest.MonkeyPatch.context() as patch:
        known_secret(patch)
        honest, lie = [
            replay(
                part, run, stated(recorded), AUTHORITIES, place / str(part.first_step),
                arguments=[str(vault), str(key)], timeout=100, compare=compare, tolerance=1e-6,
            )
            for part in stretches(intervals(recorded, 0))[1:]
        ]  # fmt: skip
    return Again(honest, lie, place / "2" / "run", compare)


def known_secret(patch: pytest.MonkeyPatch) -> None:
    """Use a known secret for the repetition, so that its records can be used again."""
    real = secrets.token_hex
    patch.setattr(secrets, "token_hex", lambda size: SECRET if size == 32 else real(size))


def shown_again(again: Again, work: Path, patch: pytest.MonkeyPatch) -> None:
    """Use an earlier repetition's records in place of executing the part."""

    def copied(*rest: Any) -> tuple[bool, str]:
        shutil.copytree(again.records, work / "run")
        return False, ""

    patch.setattr(replaying, "execute", copied)
    known_secret(patch)


@pytest.mark.threat("A2")
def test_honest_parts_come_to_the_same_bits_and_a_lie_does_not(
    recorded: Path, again: Again
) -> None:
    parts = stretches(intervals(recorded, 0))
    assert [(part.first_step, part.end.step) for part in parts] == [(0, 2), (2, 4), (4, 6)]
    honest, lie = again.honest, again.lie
    assert (honest.verdict, honest.said, honest.difference) == ("equal", "", None)
    assert (lie.verdict, lie.said) == ("different", "")
    assert lie.difference is not None
    assert 1e-6 < lie.difference.size < 10
    assert lie.difference.where.startswith(("model.", "optimizer."))


def other_start(part: Stretch, said: dict[int, list[Interval]]) -> Stretch:
    assert part.start is not None
    return replace(part, start=replace(part.start, content="00" * 32))


def other_data(part: Stretch, said: dict[int, list[Interval]]) -> Stretch:
    for chain in said.values():
        chain[:] = [
            replace(one, data=[replace(data, sha256="bb" * 32) for data in one.data])
            for one in chain
        ]
    return part


def other_samples(part: Stretch, said: dict[int, list[Interval]]) -> Stretch:
    said[1] = [
        replace(one, data=[replace(data, end=data.end - 1) for data in one.data])
        for one in said[1]
    ]  # fmt: skip
    return part


def no_data(part: Stretch, said: dict[int, list[Interval]]) -> Stretch:
    said[1] = [replace(one, data=[]) for one in said[1]]
    return part


LIES: dict[str, tuple[Any, str]] = {
    "another checkpoint in the vault": (other_start, "rank 0 began from another content"),
    "another dataset in the vault": (other_data, "rank 0 read other data"),
    "more samples than were stated": (other_samples, "rank 1 read other data"),
    "no data stated": (no_data, "rank 1 read other data"),
}


def test_the_right_content_of_another_manifest_shows_nothing(
    recorded: Path, again: Again, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank states the content that its steps lead to, and the manifest it wrote."""
    shown_again(again, tmp_path / "work", monkeypatch)
    part = stretches(intervals(recorded, 0))[1]
    outcome = replay(
        replace(part, end=replace(part.end, sha256="00" * 32)), open_run(recorded / "run"),
        stated(recorded), AUTHORITIES, tmp_path / "work", compare=again.compare,
    )  # fmt: skip
    assert (outcome.verdict, outcome.said.partition(":")[0]) == ("failed", "vault.foreign_part")


@pytest.mark.parametrize("name", LIES)
@pytest.mark.threat("A11")
def test_the_same_bits_from_something_else_show_nothing(
    name: str, recorded: Path, again: Again, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vault's copy is not trusted either: it may hold data made to fit the recorded result."""
    change, words = LIES[name]
    shown_again(again, tmp_path / "work", monkeypatch)
    said = stated(recorded)
    part = change(stretches(intervals(recorded, 0))[1], said)
    outcome = replay(part, open_run(recorded / "run"), said, AUTHORITIES, tmp_path / "work")
    assert outcome.verdict == "failed"
    assert words in outcome.said


@pytest.mark.parametrize(
    ("size", "tolerance", "verdict"),
    [
        (1e-4, 1e-3, "within"),
        (1e-3, 1e-3, "within"),
        (1e-2, 1e-3, "different"),
        (math.inf, 1e300, "different"),
        (math.inf, math.inf, "different"),
        (1e-4, 0.0, "different"),
    ],
)
def test_a_tolerance(
    size: float, tolerance: float, verdict: str, recorded: Path, again: Again, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    shown_again(again, tmp_path / "work", monkeypatch)
    part = stretches(intervals(recorded, 0))[1]
    outcome = replay(
        replace(part, end=replace(part.end, content="00" * 32)), open_run(recorded / "run"),
        stated(recorded), AUTHORITIES, tmp_path / "work",
        compare=lambda one, other: Difference(size, "model.weight"), tolerance=tolerance,
    )  # fmt: skip
    assert outcome.verdict == verdict
    assert outcome.difference == Difference(size, "model.weight")


def test_a_script_that_fails_or_is_not_there(recorded: Path, tmp_path: Path) -> None:
    run, said = open_run(recorded / "run"), stated(recorded)
    part = replace(stretches(intervals(recorded, 0))[0], world=1)
    outcome = replay(part, run, said, AUTHORITIES, tmp_path / "work", arguments=["/no/vault"])
    assert outcome.verdict == "failed"
    assert outcome.said
    missing = Stretch(2, Named("script.py", "00" * 32), None, part.end)
    outcome = replay(missing, run, said, AUTHORITIES, tmp_path / "other")
    assert outcome.verdict == "failed"
    assert outcome.said.startswith("log.malformed_run: ")
    assert "no copy of script" in outcome.said


@pytest.mark.parametrize("name", ["..", "", "authorities.pem", "a/b", "\0", "x" * 300])
@pytest.mark.threat("A13")
def test_a_script_has_any_name_and_need_not_record(
    name: str, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replaying, "execute", lambda *rest: (False, ""))
    part = stretches(intervals(recorded, 0))[0]
    named = replace(part, script=Named(name, part.script.sha256))
    outcome = replay(
        named, open_run(recorded / "run"), stated(recorded), AUTHORITIES, tmp_path / "work"
    )
    assert (outcome.verdict, outcome.said.partition(":")[0]) == ("failed", "log.malformed_run")


@pytest.mark.threat("A13")
def test_a_script_that_prints_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Seen(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Seen)
    failed, said = execute([sys.executable, "-c", "while 1: print('x')"], os.environ, 1.5)
    assert (failed, said) == (True, "it took longer than 1.5 s")
    assert started[0].returncode is not None
    failed, said = execute([sys.executable, "-c", "print('x' * 9999); 1 / 0"], os.environ, 60)
    assert failed
    assert said.rstrip().endswith("ZeroDivisionError: division by zero")
    assert len(said) <= 2000


def test_a_child_that_goes_on_does_not_hold_up_the_audit(tmp_path: Path) -> None:
    program = """
import os, sys, time
if os.fork():
    print("it has a child")
else:
    while not os.path.exists(sys.argv[1]):  # it holds its parent's output
        time.sleep(0.1)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "end")]
    try:
        assert execute(command, os.environ, 60) == (False, "it has a child\n")
    finally:
        (tmp_path / "end").touch()


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
