"""Which parts of a run are repeated, and what their outcomes mean for the answers.

Here the outcomes are given. `test_whole_way.py` repeats a real part.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sealring.formats.log.checkpoints import open_checkpoint
from sealring.formats.log.folder import LogWriter, read_checkpoint
from sealring.formats.log.notes import SignatureKind, Signer, parse_note
from sealring.record.audit import spot_checks
from sealring.record.audit.audit import AuditQuestion, AuditResult, Status, audit
from sealring.record.audit.findings import ClaimAnswer, Fault, Said
from sealring.record.audit.page import page
from sealring.record.audit.records import AuditTrust
from sealring.record.audit.spot_checks import Repetition
from sealring.record.replay import Difference, Outcome, Stretch, Verdict
from sealring.record.statements.forms import CheckpointRef
from sealring.record.statements.run_folder import RunFolder
from tests.record.audit.folder_lies import WITNESSES, changed_entry, witnessed
from tests.record.audit.made_runs import NOW, MadeRun, checkpoint, sha


def ask(
    made: MadeRun, path: Path, verdict: Verdict, monkeypatch: pytest.MonkeyPatch, count: int = 2
) -> tuple[AuditResult, list[Stretch]]:
    repeated: list[Stretch] = []

    def outcome(part: Stretch, *rest: Any, **options: Any) -> Outcome:
        repeated.append(part)
        apart = Difference(0.0625, "model.weight") if verdict == "within" else None
        return Outcome(part, verdict, "ab" * 32, apart, "Traceback\nValueError: no vault\n")

    monkeypatch.setattr(spot_checks, "replay", outcome)
    wanted = Repetition(count, tolerance=0.125)
    return audit(path, made.trust, AuditQuestion(replay=wanted)), repeated


@pytest.mark.parametrize(
    ("verdict", "said", "status"),
    [
        ("equal", Said.YES, Status.SHOWN),
        ("within", Said.YES, Status.SHOWN),
        ("failed", Said.NOT_SHOWN, Status.NOT_SHOWN),
        ("different", Said.NO, Status.REFUTED),
    ],
)
def test_outcomes(
    verdict: Verdict, said: Said, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = MadeRun(world=2, count=3)
    result, repeated = ask(made, made.write(tmp_path / "run").path, verdict, monkeypatch)
    (answer,) = result.answers
    assert (answer.claim, answer.said, result.status) == ("replay", said, status)
    assert len(repeated) == 2
    found = result.as_json()["replay"]
    assert (found["tolerance"], found["parts"], len(found["seed"])) == (0.125, 3, 64)
    assert [one["verdict"] for one in found["repeated"]] == [verdict] * 2
    assert f"<td>{verdict}</td>" in page(result)
    if verdict == "within":
        assert "model.weight differs by 0.0625, and 0.125 was allowed" in answer.text
        assert found["repeated"][0]["difference"] == 0.0625
        assert found["repeated"][0]["largest_in"] == "model.weight"
        assert "0.0625 in model.weight" in page(result)
    if verdict == "failed":
        assert "no vault" in answer.text
    if verdict == "different":
        first = next(one for one in result.findings if one.fault is Fault.REPLAY)
        turn = repeated[0].first_step // 10
        assert first.parties == ("rank 0", "rank 1")
        assert set(first.records) == {made.digests[0, turn], made.digests[1, turn]}


def chosen(
    path: Path, trust: AuditTrust, wanted: Repetition, monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    repeated: list[int] = []

    def outcome(part: Stretch, *rest: Any, **options: Any) -> Outcome:
        repeated.append(part.first_step)
        return Outcome(part, "equal", None, None, "")

    monkeypatch.setattr(spot_checks, "replay", outcome)
    audit(path, trust, AuditQuestion(replay=wanted))
    return repeated


@pytest.fixture
def long_run(tmp_path: Path) -> tuple[MadeRun, RunFolder, AuditTrust]:
    """A run of forty intervals, with witnesses."""
    made = MadeRun(world=2, count=40)
    run = made.write(tmp_path / "run")
    return made, run, witnessed(made, run)


WANTED = Repetition(4, seed=bytes(32))


@pytest.mark.threat("A12")
def test_the_witnesses_and_the_auditor_choose_the_parts(
    long_run: tuple[MadeRun, RunFolder, AuditTrust], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, run, trust = long_run
    first = chosen(run.path, trust, WANTED, monkeypatch)
    assert chosen(run.path, trust, WANTED, monkeypatch) == first
    assert len(set(first)) == 4
    drawn = {tuple(chosen(run.path, trust, Repetition(4), monkeypatch)) for _ in range(3)}
    assert len(drawn) == 3  # the log's owner cannot predict them
    text = open_checkpoint(read_checkpoint(run.log), trust.log).note.text
    with LogWriter(run.log, made.signer) as writer:
        writer.add_cosignatures([WITNESSES[2].sign(text, int(NOW.timestamp()))])
    assert chosen(run.path, trust, WANTED, monkeypatch) != first


@pytest.mark.threat("A12")
def test_a_line_that_no_witness_signed_chooses_nothing(
    long_run: tuple[MadeRun, RunFolder, AuditTrust], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run, trust = long_run
    first = chosen(run.path, trust, WANTED, monkeypatch)
    forged = Signer.generate(WITNESSES[0].name, SignatureKind.COSIGNATURE)
    path = run.log / "checkpoint"
    note = parse_note(path.read_bytes())
    line = forged.sign(note.text, int(NOW.timestamp()))
    path.write_bytes(replace(note, lines=(*note.lines, line)).encode())
    assert chosen(run.path, trust, WANTED, monkeypatch) == first


def test_without_a_believed_log_nothing_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = MadeRun(world=2, count=2)
    run = made.write(tmp_path / "run")
    changed_entry(made, run)
    result, repeated = ask(made, run.path, "equal", monkeypatch)
    assert (result.answers[0].said, repeated) == (Said.NOT_SHOWN, [])


def ends(
    made: MadeRun, path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[ClaimAnswer, list[str]]:
    result, repeated = ask(made, made.write(path).path, "equal", monkeypatch, count=99)
    (answer,) = result.answers
    starts = ["" if one.start is None else one.start.name for one in repeated]
    return answer, [f"{one}>{part.end.name}" for one, part in zip(starts, repeated, strict=True)]


@pytest.mark.threat("A12")
def test_a_content_that_is_not_named_does_not_hide_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = MadeRun(world=2, count=4)
    for rank in range(2):
        made.change(rank, 1, checkpoints_out=[replace(checkpoint(20), content=None)])
    answer, parts = ends(made, tmp_path / "run", monkeypatch)
    assert answer.said is Said.YES
    assert parts == [">model@10", "model@10>model@30", "model@30>model@40"]


def test_a_last_content_that_is_not_named_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = MadeRun(world=2, count=2)
    for rank in range(2):
        made.change(rank, 1, checkpoints_out=[replace(checkpoint(20), content=None)])
    answer, parts = ends(made, tmp_path / "run", monkeypatch)
    assert (answer.said, parts) == (Said.NOT_SHOWN, [">model@10"])
    assert "To model@20 (step 20) no part leads" in answer.text


@pytest.mark.threat("A12")
def test_a_run_that_went_back_is_repeated_from_where_it_went_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dishonest part, followed by a recovery that repeats it honestly without need."""
    made = MadeRun(world=2, count=4)
    other = CheckpointRef("model@31", 20, sha("other"), sha("other content"))
    for rank in range(2):
        made.change(
            rank, 2, first_step=10, end_step=20, checkpoints_in=[checkpoint(10)],
            checkpoints_out=[other],
        )  # fmt: skip
        made.change(rank, 3, first_step=20, end_step=30, checkpoints_out=[checkpoint(30)])
    _, parts = ends(made, tmp_path / "run", monkeypatch)
    assert parts == [">model@10", "model@10>model@20", "model@10>model@31", "model@31>model@30"]


def test_a_second_checkpoint_of_a_step_is_repeated_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = MadeRun(world=2, count=2)
    swapped = CheckpointRef("model@99", 20, sha("swapped"), sha("swapped content"))
    made.change(0, 1, checkpoints_out=[checkpoint(20), swapped])
    _, parts = ends(made, tmp_path / "run", monkeypatch)
    assert sorted(parts) == [">model@10", "model@10>model@20", "model@10>model@99"]


@pytest.mark.threat("A12")
def test_a_rank_that_states_more_checkpoints_hides_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = MadeRun(world=2, count=3)
    for sequence in range(2):
        made.change(1, sequence, checkpoints_out=[checkpoint(10 * sequence + 10)] * 5)
    made.change(1, 2, checkpoints_out=[])
    _, parts = ends(made, tmp_path / "run", monkeypatch)
    assert parts == [">model@10", "model@10>model@20", "model@20>model@30"]
