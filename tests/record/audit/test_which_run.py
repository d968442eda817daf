"""The records of another run or job do not pass for those that the auditor asked about."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sealring.formats.log.notes import Kind, Signer
from sealring.record.audit.audit import Status, audit
from sealring.record.audit.findings import Fault
from sealring.record.statements.run_folder import RunFolder
from tests.record.audit.made_runs import JOB, RUN, MadeRun
from tests.record.audit.test_command import options, run


def of_another_job(folder: Path) -> tuple[MadeRun, RunFolder]:
    """Workers of another job of the same authority, in a folder that names their job."""
    made = MadeRun(world=2, count=2)
    for rank in range(made.world):
        made.workers[rank] = made.authority.worker(rank, made.world, job="toy")
    found = made.write(folder)
    rewrite_head(found, job="toy")
    return made, found


def rewrite_head(found: RunFolder, **fields: str) -> None:
    head = found.path / "run.json"
    head.write_text(json.dumps({**json.loads(head.read_text()), **fields}))


def test_workers_of_another_job_do_not_pass_for_those_of_the_auditors(tmp_path: Path) -> None:
    made, found = of_another_job(tmp_path / "run")
    result = audit(found.path, replace(made.trust, job=JOB))
    assert result.status is Status.REFUTED
    assert {finding.fault for finding in result.findings} == {Fault.OTHER_JOB}
    assert len(result.findings) == 1 + 4  # run.json, and each statement
    assert (result.jobs, result.ranks) == ((), 0)
    assert audit(found.path, replace(made.trust, job="toy")).status is Status.SHOWN


@pytest.mark.parametrize(("job", "status"), [(JOB, 1), ("toy", 0), (None, 0)])
def test_the_command_asks_for_the_job_and_says_whose_records_it_read(
    tmp_path: Path, job: str | None, status: int
) -> None:
    made, _ = of_another_job(tmp_path / "run")
    arguments = [] if job is None else ["--job", job]
    without_model = options(tmp_path, made)[:-2]
    found, text = run([*without_model, *arguments])
    assert found == status
    shown = "not shown" if status else "toy"
    assert f"Run {RUN}, job {shown}: " in " ".join(text.split())


def signed_as(origin: str) -> MadeRun:
    return MadeRun(world=2, count=2, signer=Signer.generate(origin, Kind.NOTE))


def test_a_recorded_runs_log_holds_no_other_run(tmp_path: Path) -> None:
    """The disk has the key of a run's log: it logs another run's records, and rewrites run.json."""
    made = signed_as("sealring.run/expected")
    found = made.write(tmp_path / "run")
    result = audit(found.path, made.trust)
    assert result.status is Status.REFUTED
    assert {finding.fault for finding in result.findings} == {Fault.OTHER_JOB}
    assert len(result.findings) == 1 + 4
    assert result.run == "expected"


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
