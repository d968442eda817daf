"""The machines that workers ran on: certificates and evidence, judged as of their own dates."""

from __future__ import annotations

from dataclasses import dataclass, field

from cryptography import x509

from sealring.core.hooks import MachinePolicy, evidence_judge
from sealring.core.identity.certificates import CLOCK_SKEW, claims_of
from sealring.errors import AttestationError, MalformedRun, NotAttested, PolicyRefusal
from sealring.record.audit.findings import Fault, Finding
from sealring.record.audit.records import Records
from sealring.record.audit.trust import AuditTrust
from sealring.record.provenance.runs import RunFolder


@dataclass(slots=True)
class Machines:
    """What the certificates of a run show."""

    findings: list[Finding] = field(default_factory=list)
    unattested: list[str] = field(default_factory=list)
    """Parties whose certificates say nothing of an attestation."""
    without_evidence: list[str] = field(default_factory=list)
    """Parties whose evidence is not in the folder, so that the authority's word is all there is."""
    judged: int = 0
    """Certificates whose evidence was verified again."""


def check_machines(
    records: Records, run: RunFolder, policy: MachinePolicy | None, trust: AuditTrust
) -> Machines:
    """Without a policy, only that the evidence in the folder is what certificates name."""
    found = Machines()
    signed: dict[str, list[str]] = {}
    for turn in records.turns:
        signed.setdefault(turn.worker.certificate, []).append(turn.digest)
    for fingerprint, certificate in records.certificates.items():
        _check(found, certificate, tuple(signed.get(fingerprint, ())), run, policy, trust)
    return found


def _check(
    found: Machines, certificate: x509.Certificate, signed: tuple[str, ...], run: RunFolder,
    policy: MachinePolicy | None, trust: AuditTrust,
) -> None:  # fmt: skip
    name = claims_of(certificate).name
    party = f"rank {name.rank}"
    judge = evidence_judge.one()
    claimed = judge.claims_in(certificate)
    if claimed is None:
        found.unattested.append(party)
        return

    def fault(kind: Fault, problem: Exception) -> None:
        text = f"{type(problem).__name__}: {problem}"
        found.findings.append(Finding(kind, (party,), text, signed))

    # Evidence is judged as of its date. At another time it may pass what it did not pass then.
    starts = certificate.not_valid_before_utc
    if not starts - CLOCK_SKEW <= claimed.verified_at <= starts + 2 * CLOCK_SKEW:
        text = f"the certificate begins at {starts:%Y-%m-%d %H:%M} UTC, and says that its evidence"
        when = f"{claimed.verified_at:%Y-%m-%d %H:%M} UTC"
        fault(Fault.EVIDENCE, NotAttested(f"{text} was verified at {when}"))
        return
    try:
        evidence = run.evidence(claimed.evidence_digest)
    except MalformedRun as problem:
        fault(Fault.EVIDENCE, problem)
        return
    if evidence is None:
        found.without_evidence.append(party)
    if policy is None:
        return
    try:
        judge.judge_recorded(policy, certificate, evidence, trust.vendors)
        found.judged += evidence is not None
    except PolicyRefusal as problem:
        fault(Fault.NOT_ADMITTED, problem)
    except AttestationError as problem:
        fault(Fault.EVIDENCE, problem)
