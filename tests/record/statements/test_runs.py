"""The folder of a run, which several ranks write and which may come from a stranger."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from sealring.errors import ConfigurationError, MalformedRun
from sealring.record.statements.run_folder import create_run, open_run


def test_ranks_share_a_folder_and_its_statements_come_back(tmp_path: Path) -> None:
    one = create_run(tmp_path / "run", "job", "r1")
    two = create_run(tmp_path / "run", "job", "r1")
    one.write_statement("rank-0-0", b"zero")
    two.write_statement("rank-1-0", b"one")
    found = open_run(tmp_path / "run")
    assert (found.head.run, found.head.job) == ("r1", "job")
    assert list(found.statements()) == [("rank-0-0", b"zero"), ("rank-1-0", b"one")]
    digest = one.write_evidence(b"script")
    assert digest == hashlib.sha256(b"script").hexdigest() == two.write_evidence(b"script")
    assert found.evidence(digest) == b"script"
    assert found.evidence("00" * 32) is None


def test_the_first_rank_names_the_run(tmp_path: Path) -> None:
    first = create_run(tmp_path / "run", "job")
    assert create_run(tmp_path / "run", "job").head == first.head
    assert not list((tmp_path / "run" / ".new").iterdir())


def test_another_rank_makes_the_folder_at_the_same_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Path.iterdir

    def after_the_other(path: Path) -> Iterator[Path]:
        monkeypatch.setattr(Path, "iterdir", look)
        create_run(path, "job", "of the other")
        return look(path)

    monkeypatch.setattr(Path, "iterdir", after_the_other)
    assert create_run(tmp_path / "run", "job").head.run == "of the other"


@pytest.mark.threat("L18")
def test_a_statement_is_not_overwritten(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", "job", "r1")
    run.write_statement("rank-0-0", b"zero")
    for name in ("rank-0-0", "../outside", "Rank", ""):
        with pytest.raises(ConfigurationError, match="no name for a statement"):
            run.write_statement(name, b"other")
    assert list(run.statements()) == [("rank-0-0", b"zero")]


@pytest.mark.threat("L18")
def test_of_two_workers_that_write_one_statement_at_once_one_is_refused(tmp_path: Path) -> None:
    """The job was started twice in one folder. No signed statement may disappear."""
    run = create_run(tmp_path / "run", "job", "r1")
    for number in range(20):
        together = Barrier(2)

        def write(content: bytes, name: str = f"rank-0-{number}", all_: Barrier = together) -> bool:
            all_.wait(60)
            try:
                run.write_statement(name, content)
            except ConfigurationError:
                return False
            return True

        with ThreadPoolExecutor(2) as threads:
            one, other = threads.map(write, (b"one", b"other"))
        assert one != other
        assert run.read_statement(f"rank-0-{number}") == (b"one" if one else b"other")


def test_a_folder_of_another_run_or_of_something_else(tmp_path: Path) -> None:
    create_run(tmp_path / "run", "job", "r1")
    with pytest.raises(ConfigurationError, match="choose another folder"):
        create_run(tmp_path / "run", "job", "r2")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("dear")
    with pytest.raises(ConfigurationError, match="not empty"):
        create_run(tmp_path / "home", "job", "r1")
    with pytest.raises(MalformedRun, match=r"no run\.json"):
        open_run(tmp_path / "home")


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 60_000, "nested too deeply"),
        (b" " * 100_000, "is larger than"),
        (b"[]", "not what a run's folder has"),
        (b'{"format":"sealring run","version":1,"run":"r"}', "not what a run's folder has"),
        (b'{"format":"sealring run","version":1,"run":"r","job":"\\ud800"}', "job is not what"),
        (b'{"format":"sealring run","version":1,"run":"r","run":"s","job":"j"}', "a key twice"),
        (b'{"format":"sealring run","version":2,"run":"r","job":"j"}', "of version 2"),
        (b'{"format":"other","version":1,"run":"r","job":"j"}', "of 'other'"),
    ],
)
def test_heads_that_no_run_has(tmp_path: Path, head: bytes, said: str) -> None:
    (tmp_path / "run.json").write_bytes(head)
    with pytest.raises(MalformedRun, match=said):
        open_run(tmp_path)


@pytest.mark.threat("L18")
def test_files_that_no_run_has(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", "job", "r1")
    run.write_statement("rank-0-0", b"zero")
    statements = run.path / "statements"
    for name in ("letter", "Upper.dsse.json", "x.json"):  # an audit refuses a folder with these
        (statements / name).write_bytes(b"")
        assert list(run.statements()) == [("rank-0-0", b"zero")]
    os.symlink("/etc/hostname", statements / "link.dsse.json")
    with pytest.raises(MalformedRun, match="is a link"):
        list(run.statements())


@pytest.mark.threat("L18")
def test_evidence_that_was_changed(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", "job", "r1")
    digest = run.write_evidence(b"script")
    (run.path / "evidence" / digest).write_bytes(b"other")
    with pytest.raises(MalformedRun, match="it was changed"):
        run.evidence(digest)
    for name in ("../run.json", "x", ""):
        with pytest.raises(MalformedRun, match="not a digest"):
            run.evidence(name)
    (run.path / "evidence" / digest).unlink()
    (tmp_path / "script").write_bytes(b"script")
    os.symlink(tmp_path / "script", run.path / "evidence" / digest)
    with pytest.raises(MalformedRun, match="is a link"):
        run.evidence(digest)
    assert json.loads((run.path / "run.json").read_text())["run"] == "r1"
