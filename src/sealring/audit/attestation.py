"""The machines that workers ran on: certificates and evidence, judged as of their own dates."""

from __future__ import annotations

from dataclasses import dataclass, field

from cryptography import x509

from sealring.audit.findings import Fault, Finding
from sealring.audit.records import Records
from sealring.audit.trust import AuditTrust
from sealring.errors import MalformedRun, NotAttested, PeerNotAdmitted
from sealring.identity.attestation.admission import Admission
from sealring.identity.attestation.claims import claims_in
from sealring.identity.attestation.policy import Policy
from sealring.identity.certificates import claims_of
from sealring.provenance.runs import RunFolder


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
    records: Records, run: RunFolder, policy: Policy | None, trust: AuditTrust
) -> Machines:
    """Without a policy, only that the evidence in the folder is what certificates name."""
    found = Machines()
    for fingerprint, certificate in records.certificates.items():
        signed = tuple(
            turn.digest for turn in records.turns if turn.worker.certificate == fingerprint
        )
        _check(found, certificate, signed, run, policy, trust)
    return found


def _check(
    found: Machines, certificate: x509.Certificate, signed: tuple[str, ...], run: RunFolder,
    policy: Policy | None, trust: AuditTrust,
) -> None:  # fmt: skip
    name = claims_of(certificate).name
    party = f"rank {name.rank}"
    claimed = claims_in(certificate)
    if claimed is None:
        found.unattested.append(party)
        return

    def fault(kind: Fault, problem: Exception) -> None:
        text = f"{type(problem).__name__}: {problem}"
        found.findings.append(Finding(kind, (party,), text, signed))

    try:
        evidence = run.evidence(claimed.evidence_digest)
    except MalformedRun as problem:
        fault(Fault.EVIDENCE, problem)
        return
    if evidence is None:
        found.without_evidence.append(party)
    if policy is None:
        return
    admission = Admission(policy, lambda: trust.vendors.trust(policy, claimed.verified_at))
    try:
        admission.check_certificate(certificate, name, party)
        if evidence is not None:
            admission.check_evidence(certificate, claimed, evidence, name, party)
            found.judged += 1
    except PeerNotAdmitted as problem:
        fault(Fault.NOT_ADMITTED, problem)
    except NotAttested as problem:
        fault(Fault.EVIDENCE, problem)
