"""The claim `machines`: certificates and evidence are judged as of their own dates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sealring.record.audit.audit import AuditQuestion, AuditResult, Status, audit
from sealring.record.audit.claims import RunClaims
from sealring.record.audit.findings import Fault, Said
from sealring.record.statements.run_folder import RunFolder
from sealring.record.statements.signing import worker_of
from tests.record.audit.attested import (
    MEASUREMENT,
    attested_run,
    policy,
    with_evidence_of_another,
    with_evidence_of_another_day,
    with_other_measurement,
)
from tests.record.audit.made_runs import MadeRun


def ask(folder: Path, made: MadeRun, **rules: bool) -> AuditResult:
    claims = RunClaims(machines=policy(MEASUREMENT, **rules))
    return audit(folder, made.trust, AuditQuestion(claims))


def small() -> MadeRun:
    return attested_run(world=2, count=2)


def test_attested_machines_are_shown_after_their_certificates_have_ended(tmp_path: Path) -> None:
    made = small()
    result = ask(made.write(tmp_path / "run").path, made)
    (answer,) = result.answers
    assert (answer.said, answer.text[:2]) == (Said.YES, "2 ")
    assert result.findings == ()


def test_machines_that_were_not_attested_are_not_shown(tmp_path: Path) -> None:
    made = MadeRun(world=2, count=2)
    result = ask(made.write(tmp_path / "run").path, made)
    assert [one.said for one in result.answers] == [Said.NOT_SHOWN]
    assert result.status is Status.NOT_SHOWN


@pytest.mark.parametrize(("peers", "said"), [(True, Said.NOT_SHOWN), (False, Said.YES)])
def test_evidence_that_is_not_in_the_folder(tmp_path: Path, peers: bool, said: Said) -> None:
    made = small()
    made.evidence.clear()
    result = ask(made.write(tmp_path / "run").path, made, peers=peers)
    assert [one.said for one in result.answers] == [said]


def change_the_file(made: MadeRun, run: RunFolder) -> None:
    attestation = worker_of(made.workers[1].certificate).attestation
    assert attestation is not None
    path = run.path / "evidence" / attestation.evidence
    path.write_bytes(made.evidence[0])


Lie = tuple[str, Callable[[MadeRun], None], Callable[[MadeRun, RunFolder], None], Fault]
LIES: dict[str, Lie] = {
    "exchanges evidence": (
        "the disk", lambda made: None, change_the_file, Fault.EVIDENCE,
    ),
    "names evidence of another worker": (
        "the broker's operator", lambda made: with_evidence_of_another(made, 1),
        lambda made, run: None, Fault.EVIDENCE,
    ),
    "admits a machine that the policy does not": (
        "the broker's operator", lambda made: with_other_measurement(made, 1),
        lambda made, run: None, Fault.NOT_ADMITTED,
    ),
    "dates back when a machine was verified": (
        "the broker's operator", lambda made: with_evidence_of_another_day(made, 1),
        lambda made, run: None, Fault.EVIDENCE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
@pytest.mark.threat("A1")
def test_a_lie_about_a_machine(name: str, tmp_path: Path) -> None:
    _, before, after, fault = LIES[name]
    made = small()
    before(made)
    run = made.write(tmp_path / "run")
    after(made, run)
    result = ask(run.path, made)
    (finding,) = result.findings
    assert (finding.fault, finding.parties) == (fault, ("rank 1",))
    assert set(finding.records) == {made.digests[1, 0], made.digests[1, 1]}
    assert [one.said for one in result.answers] == [Said.NO]
    assert result.status is Status.REFUTED


@pytest.mark.parametrize("hours", [-1, 1])
def test_evidence_was_verified_when_its_certificate_was_issued(tmp_path: Path, hours: int) -> None:
    """A later date is refused too, even within the certificate's life: the machine might have
    failed at the time."""
    made = small()
    with_evidence_of_another_day(made, 0, hours)
    result = ask(made.write(tmp_path / "run").path, made)
    assert [(one.fault, one.parties) for one in result.findings] == [(Fault.EVIDENCE, ("rank 0",))]
    assert [one.said for one in result.answers] == [Said.NO]
