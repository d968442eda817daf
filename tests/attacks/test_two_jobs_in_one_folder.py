"""Records of another job or run must not count as those that the auditor asked about.

They may lie beside the right records in one folder, or replace them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sealring.formats.log.notes import SignatureKind, Signer
from sealring.record.audit.audit import AuditQuestion, AuditResult, Status, audit
from sealring.record.audit.claims import RunClaims
from sealring.record.audit.findings import Fault, Said
from sealring.record.statements.run_folder import RunFolder
from sealring.record.statements.signing import sign_statement
from tests.record.audit.made_runs import JOB, MODEL, RAW, RUN, MadeRun, checkpoint, stage
from tests.record.audit.test_command import options
from tests.record.audit.test_command import run as run_command

CLAIMS = RunClaims(trained_only_on=frozenset({RAW.sha256}), ranks=2, no_gaps=True)


def a_run(first: MadeRun | None = None, job: str = JOB, run: str = RUN, world: int = 2) -> MadeRun:
    """Makes a run; with `first`, it has the same authority and the same owner."""
    made = MadeRun(world=world, count=2)
    if first is not None:
        made = replace(made, authority=first.authority, owner=first.owner, signer=first.signer)
    made.workers = {rank: made.authority.worker(rank, world, job=job) for rank in range(world)}
    made.turns = {place: replace(one, run=run) for place, one in made.turns.items()}
    return made


def mixed(first: MadeRun, second: MadeRun, path: Path) -> RunFolder:
    """Writes the first run's folder and adds the second run's statements, also to the log."""
    folder = first.write(path)
    for name, envelope in second.envelopes():
        if name.startswith("rank-"):
            first.add(folder, f"second-{name}", envelope)
    return folder


def ask(folder: RunFolder, made: MadeRun, job: str | None = None) -> AuditResult:
    file = folder.path.with_name("model.bin")
    file.write_bytes(MODEL)
    return audit(folder.path, replace(made.trust, job=job), AuditQuestion(CLAIMS, file))


@pytest.mark.parametrize(
    ("job", "run"), [("job2", RUN), ("job2", "run-2"), (JOB, "run-2"), (JOB, RUN + " ")]
)
@pytest.mark.threat("A5")
def test_statements_of_another_job_or_run(job: str, run: str, tmp_path: Path) -> None:
    first = a_run()
    result = ask(mixed(first, a_run(first, job, run), tmp_path / "run"), first)
    assert {one.fault for one in result.findings} == {Fault.OTHER_JOB}
    assert len(result.findings) == 4
    assert {one.parties[0] for one in result.findings} == {f"rank {r} of {job}" for r in range(2)}
    assert (result.status, result.jobs, result.ranks) == (Status.REFUTED, (JOB,), 2)
    # The answers about the first job stay as they were.
    said = {one.claim: one.said for one in result.answers}
    assert said == {
        "trained_only_on": Said.YES, "ranks": Said.YES, "no_gaps": Said.NO, "model": Said.YES,
    }  # fmt: skip


@pytest.mark.threat("A5")
def test_two_starts_of_one_job_that_state_one_run(tmp_path: Path) -> None:
    """Both starts sign with valid certificates of the job, so each chain number occurs twice."""
    first = a_run()
    result = ask(mixed(first, a_run(first), tmp_path / "run"), first)
    assert [one.parties for one in result.findings if one.fault is Fault.TWO_STATEMENTS] == [
        (f"rank {rank}",) for rank in (0, 0, 1, 1)
    ]
    assert result.status is Status.REFUTED


@pytest.mark.threat("A5")
def test_the_ranks_of_a_larger_job_beside_those_of_a_smaller(tmp_path: Path) -> None:
    """Ranks 2 and 3 belong to a second start with four ranks, and not to the first one."""
    first = a_run()
    second = a_run(first, world=4)
    second.turns = {place: one for place, one in second.turns.items() if place[0] >= 2}
    result = ask(mixed(first, second, tmp_path / "run"), first)
    assert Fault.DISAGREEMENT in {one.fault for one in result.findings}
    assert {one.claim: one.said for one in result.answers}["ranks"] is Said.NO


@pytest.mark.threat("A5")
def test_the_owners_export_of_another_job(tmp_path: Path) -> None:
    """An owner's record names no run; the checkpoint that was exported tells which run it was."""
    first = a_run()
    end = checkpoint(999)
    exported = replace(
        first.made[2], inputs=[replace(first.made[2].inputs[0], name=end.name, sha256=end.sha256)]
    )
    first.made = first.made[:2]
    folder = first.write(tmp_path / "run")
    first.add(folder, "second-export", sign_statement(exported, first.owner))
    result = ask(folder, first)
    (answer,) = (one for one in result.answers if one.claim == "model")
    assert answer.said is Said.NO
    assert "exported from something that no rank of this run wrote" in answer.text


@pytest.mark.threat("A5")
def test_a_workers_stage_of_another_job(tmp_path: Path) -> None:
    first = a_run()
    second = a_run(first, "job2")
    folder = first.write(tmp_path / "run")
    one = stage("export", "export", first.made[2].inputs, first.made[2].outputs, RAW)
    first.add(folder, "second-export", sign_statement(one, second.workers[0]))
    (finding,) = ask(folder, first).findings
    assert (finding.fault, finding.parties) == (Fault.OTHER_JOB, ("rank 0 of job2", "the disk"))


# ---- a whole folder of another job or run


def wholly_of_another_job(folder: Path) -> tuple[MadeRun, RunFolder]:
    """Makes a folder that names another job, with statements of that job's workers."""
    made = MadeRun(world=2, count=2)
    for rank in range(made.world):
        made.workers[rank] = made.authority.worker(rank, made.world, job="toy")
    found = made.write(folder)
    rewrite_head(found, job="toy")
    return made, found


def rewrite_head(found: RunFolder, **fields: str) -> None:
    head = found.path / "run.json"
    head.write_text(json.dumps({**json.loads(head.read_text()), **fields}))


@pytest.mark.threat("A7")
def test_workers_of_another_job_do_not_pass_for_those_of_the_auditors(tmp_path: Path) -> None:
    made, found = wholly_of_another_job(tmp_path / "run")
    result = audit(found.path, replace(made.trust, job=JOB))
    assert result.status is Status.REFUTED
    assert {finding.fault for finding in result.findings} == {Fault.OTHER_JOB}
    assert len(result.findings) == 1 + 4  # run.json, and each statement
    assert result.findings[0].parties == ("the disk",)
    assert f"run.json names run {RUN} of job toy" in result.findings[0].text
    assert (result.jobs, result.ranks) == ((), 0)
    assert audit(found.path, replace(made.trust, job="toy")).status is Status.SHOWN


@pytest.mark.parametrize(("job", "status"), [(JOB, 1), ("toy", 0), (None, 0)])
def test_the_command_asks_for_the_job_and_says_whose_records_it_read(
    tmp_path: Path, job: str | None, status: int
) -> None:
    made, _ = wholly_of_another_job(tmp_path / "run")
    arguments = [] if job is None else ["--job", job]
    without_model = options(tmp_path, made)[:-2]
    found, text = run_command([*without_model, *arguments])
    assert found == status
    shown = "not shown" if status else "toy"
    assert f"Run {RUN}, job {shown}: " in " ".join(text.split())


def signed_as(origin: str) -> MadeRun:
    return MadeRun(world=2, count=2, signer=Signer.generate(origin, SignatureKind.NOTE))


@pytest.mark.threat("A7")
def test_a_recorded_runs_log_holds_no_other_run(tmp_path: Path) -> None:
    """An attacker with the log's key logs another run's records and rewrites run.json."""
    made = signed_as("sealring.run/expected")
    found = made.write(tmp_path / "run")
    result = audit(found.path, made.trust)
    assert result.status is Status.REFUTED
    assert {finding.fault for finding in result.findings} == {Fault.OTHER_JOB}
    assert len(result.findings) == 1 + 4
    assert result.run == "expected"


@pytest.mark.threat("A7")
def test_a_name_that_was_changed_in_run_json_alone_is_named(tmp_path: Path) -> None:
    made = signed_as(f"sealring.run/{RUN}")
    found = made.write(tmp_path / "run")
    assert audit(found.path, made.trust).status is Status.SHOWN
    rewrite_head(found, run="another")
    result = audit(found.path, made.trust)
    assert [(one.fault, one.parties) for one in result.findings] == [
        (Fault.OTHER_JOB, ("the disk",))
    ]
    assert result.ranks == 2
