"""The logs that brokers publish, against the certificates that signed a run's statements.

An authority's key can sign any certificate. A broker that follows the protocol logs each one before
it is given, so that one which is in no log was made in another way, or the log was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from sealring.audit.findings import Fault, Finding
from sealring.audit.log_check import read_log, refused
from sealring.audit.records import Records, Turn
from sealring.audit.trust import AuditTrust
from sealring.errors import LogError, WrongLog
from sealring.identity.attestation.claims import claims_in
from sealring.identity.certificates import CLOCK_SKEW, claims_of
from sealring.identity.verification import is_issued_by
from sealring.provenance.broker_entries import BrokerHistory, log_of_broker

OPERATOR = "the broker's operator"
_ISSUED_WITHIN = CLOCK_SKEW + timedelta(seconds=1)
"""A certificate begins so long before it is issued, at most. Its dates have whole seconds."""


def check_brokers(folders: Sequence[Path], records: Records, trust: AuditTrust) -> list[Finding]:
    """Where no log is given, nothing is said. Where one is refused, nothing is compared with it."""
    if not folders:
        return []
    histories: dict[str, BrokerHistory] = {}
    findings = []
    for folder in folders:
        try:
            origin, history = _history(folder, trust)
        except LogError as problem:
            findings.append(refused(problem, (OPERATOR, "the disk")))
        else:
            histories[origin] = history
    if findings:
        return findings
    signed: dict[str, list[Turn]] = {}
    for turn in records.turns:
        signed.setdefault(turn.worker.certificate, []).append(turn)
    for fingerprint, certificate in records.certificates.items():
        issuer = next(one for one in trust.authorities if is_issued_by(certificate, (one,)))
        history = histories.get(log_of_broker(issuer), BrokerHistory())
        findings += _check(
            certificate, records.keys[fingerprint], signed.get(fingerprint, []), history
        )
    return findings


def _history(folder: Path, trust: AuditTrust) -> tuple[str, BrokerHistory]:
    history = BrokerHistory()
    assert trust.brokers is not None  # the caller of `audit` gives both or none
    signed, _ = read_log(folder, trust.brokers, history.add)
    origin = signed.checkpoint.origin
    if origin not in {log_of_broker(one) for one in trust.authorities}:
        raise WrongLog(
            f"{origin} is not the log of a broker of these authorities: another broker's log says "
            "nothing of their certificates"
        )
    return origin, history


def _check(
    certificate: x509.Certificate, key: str, turns: Sequence[Turn], history: BrokerHistory
) -> list[Finding]:
    name = claims_of(certificate).name
    party = f"rank {name.rank}"
    digests = tuple(turn.digest for turn in turns)
    starts = certificate.not_valid_before_utc
    given = [
        one
        for one in history.given.get((name.job, name.rank, key), ())
        if starts.timestamp() <= one.time <= (starts + _ISSUED_WITHIN).timestamp()
    ]
    claimed = claims_in(certificate)
    label = None if claimed is None else claimed.label
    found = []
    if not given:
        text = (
            f"{party} signs with a certificate of {_when(starts.timestamp())} for the key "
            f"{key[:12]}, which the broker's log does not name: the broker did not give it, or its "
            "log was cut"
        )
        found.append(Finding(Fault.NOT_GIVEN, (party, OPERATOR), text, digests))
    elif label not in {one.kind for one in given}:
        text = (
            f"the certificate of {party} says that it was attested as {label or 'nothing'}, and "
            f"the broker's log names {given[0].kind[:80]}"
        )
        found.append(Finding(Fault.NOT_GIVEN, (party, OPERATOR), text, digests))
    out = history.out.get((name.job, key))
    late = () if out is None else tuple(t.digest for t in turns if t.interval.finished > out.time)
    if out is not None and late:
        text = (
            f"{party} goes on after {_when(out.time)}, when the broker took its key {key[:12]} out "
            f"of the job ({out.why})"
        )
        found.append(Finding(Fault.REVOKED, (party,), text, late))
    return found


def _when(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
