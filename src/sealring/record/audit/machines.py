"""Checks the machines that workers ran on, by certificates and evidence, and by brokers' logs.

Certificates and evidence are judged as of their own dates. An authority's key can sign any
certificate. But a broker that follows the protocol logs each certificate before it gives it out. So
a certificate that is in no log was made in another way, or the log was cut.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from sealring.core.hooks import MachinePolicy, evidence_judge
from sealring.core.identity.certificates import CLOCK_SKEW, claims_of
from sealring.core.identity.verification import is_issued_by
from sealring.errors import (
    AttestationError,
    ForgedStatement,
    LogError,
    MalformedRun,
    PeerNotAdmitted,
    PolicyRefusal,
    named,
)
from sealring.formats.log.broker_entries import BrokerHistory, log_of_broker
from sealring.record.audit.findings import Fault, Finding, blame
from sealring.record.audit.records import (
    AuditTrust,
    RankInterval,
    Records,
    check_seen,
    read_log,
    refused,
)
from sealring.record.statements.run_folder import RunFolder

# ---- evidence


@dataclass(slots=True)
class Machines:
    """What the certificates of a run show about its machines."""

    findings: list[Finding] = field(default_factory=list)
    unattested: list[str] = field(default_factory=list)
    """Parties whose certificates state no attestation."""
    without_evidence: list[str] = field(default_factory=list)
    """Parties whose evidence is not in the folder. Only the authority vouches for them."""
    judged: int = 0
    """The number of certificates whose evidence was verified again."""


def check_machines(
    records: Records, run: RunFolder, policy: MachinePolicy | None, trust: AuditTrust
) -> Machines:
    """Checks certificates and evidence. Without a policy, only that they belong to each other."""
    found = Machines()
    signed: dict[str, list[str]] = {}
    for turn in records.turns:
        signed.setdefault(turn.worker.certificate, []).append(turn.digest)
    for fingerprint, certificate in records.certificates.items():
        _check_evidence(found, certificate, tuple(signed.get(fingerprint, ())), run, policy, trust)
    return found


def _check_evidence(
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
        text = f"{named(problem)}: {problem}"
        found.findings.append(Finding(kind, (party,), text, signed))

    # Evidence is judged as of its date. Judged for another date, it could pass what failed then.
    starts = certificate.not_valid_before_utc
    if not starts - CLOCK_SKEW <= claimed.verified_at <= starts + 2 * CLOCK_SKEW:
        text = f"the certificate begins at {starts:%Y-%m-%d %H:%M} UTC, and says that its evidence"
        when = f"{claimed.verified_at:%Y-%m-%d %H:%M} UTC"
        fault(
            Fault.EVIDENCE,
            PeerNotAdmitted(f"{text} was verified at {when}", code="handshake.not_attested"),
        )
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


# ---- brokers' logs


OPERATOR = "the broker's operator"
_PARTIES = (OPERATOR, "the disk")
_ISSUED_WITHIN = CLOCK_SKEW + timedelta(seconds=1)
"""The longest time from a certificate's first date to its issue. Its dates have whole seconds."""


def check_brokers(folders: Sequence[Path], records: Records, trust: AuditTrust) -> list[Finding]:
    """Compares certificates with the brokers' logs. A log that is refused gives only a finding."""
    histories: dict[str, BrokerHistory] = {}
    findings = []
    for folder in folders:
        try:
            origin, history, contradicted = _history(folder, trust)
        except LogError as problem:
            findings.append(refused(problem, _PARTIES))
        else:
            histories[origin] = history
            findings += contradicted
    findings += _seen_of_no_log(histories, trust)
    if findings or not folders:
        return findings
    signed: dict[str, list[RankInterval]] = {}
    for turn in records.turns:
        signed.setdefault(turn.worker.certificate, []).append(turn)
    for fingerprint, certificate in records.certificates.items():
        issuer = next(one for one in trust.authorities if is_issued_by(certificate, (one,)))
        history = histories.get(log_of_broker(issuer), BrokerHistory())
        findings += _check_given(
            certificate, records.keys[fingerprint], signed.get(fingerprint, []), history
        )
    return findings


def _history(folder: Path, trust: AuditTrust) -> tuple[str, BrokerHistory, list[Finding]]:
    """The log's origin and content, and findings where checkpoints seen elsewhere contradict it."""
    history = BrokerHistory()
    assert trust.brokers is not None  # the caller of `audit` gives both or none
    signed, stored = read_log(folder, trust.brokers, history.add)
    origin = signed.origin
    if origin not in trust.broker_origins:
        raise ForgedStatement(
            f"{origin} is not the log of a broker of these authorities: another broker's log says "
            "nothing of their certificates",
            code="log.wrong",
        )
    seen = [one for one in trust.seen if one.origin == origin]
    return origin, history, check_seen(signed, stored, seen, _PARTIES)


def _seen_of_no_log(read: Container[str], trust: AuditTrust) -> list[Finding]:
    """Findings for checkpoints of a broker's log whose folder was not given or was refused."""
    seen = {one.origin for one in trust.seen} & trust.broker_origins
    return [
        refused(
            ForgedStatement(
                f"a checkpoint of {origin} was seen, and that log is none of those here",
                code="log.wrong",
            ),
            _PARTIES,
        )
        for origin in sorted(seen)
        if origin not in read
    ]


def _check_given(
    certificate: x509.Certificate, key: str, turns: Sequence[RankInterval], history: BrokerHistory
) -> Iterator[Finding]:
    """Compares a certificate with a broker's log. `turns` are the statements that it signed."""
    name = claims_of(certificate).name
    party = f"rank {name.rank}"
    starts = certificate.not_valid_before_utc
    given = [
        one
        for one in history.given.get((name.job, name.rank, key), ())
        if starts.timestamp() <= one.time <= (starts + _ISSUED_WITHIN).timestamp()
    ]
    claimed = evidence_judge.one().claims_in(certificate)
    label = None if claimed is None else claimed.label
    if not given:
        text = (
            f"{party} signs with a certificate of {_when(starts.timestamp())} for the key "
            f"{key[:12]}, which the broker's log does not name: the broker did not give it, or its "
            "log was cut"
        )
        yield blame(Fault.NOT_GIVEN, text, *turns, also=[party, OPERATOR])
    elif label not in {one.kind for one in given}:
        text = (
            f"the certificate of {party} says that it was attested as {label or 'nothing'}, and "
            f"the broker's log names {given[0].kind[:80]}"
        )
        yield blame(Fault.NOT_GIVEN, text, *turns, also=[party, OPERATOR])
    out = history.out.get((name.job, key))
    late = [] if out is None else [one for one in turns if one.interval.finished > out.time]
    if out is not None and late:
        text = (
            f"{party} goes on after {_when(out.time)}, when the broker took its key {key[:12]} out "
            f"of the job ({out.why})"
        )
        yield blame(Fault.REVOKED, text, *late)


def _when(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
