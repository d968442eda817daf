"""What a certificate says of its holder's attestation: the broker's word, signed with the rest.

{"version": 1, "evidence": SHA-256, "nonce": hex, "policy": SHA-256, "worker": {...}}

A ClaimedWorker is believed as far as its authority is. Whoever has the authority's key can claim
anything; a policy with `[peers] evidence = true` therefore has peers show the evidence itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from cryptography import x509

from sealring.identity.attestation.chains import ListSeen
from sealring.identity.attestation.worker import AttestedWorker
from sealring.identity.certificates import ATTESTATION_OID

VERSION: Final = 1
MAX_CLAIM_BYTES: Final = 8 << 10
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_MAX_TEXT: Final = 256
_TEXTS: Final = ("kind", "product", "machine", "measurement", "signer")


@dataclass(frozen=True, slots=True)
class ClaimedWorker:
    """What a certificate says; whether its issuer may say so was verified before."""

    kind: str
    product: str
    machine: str
    measurement: str
    signer: str
    tcb: Mapping[str, int]
    debug: bool
    guest: Mapping[str, int]
    lists: tuple[ListSeen, ...]
    verified_at: datetime
    nonce: bytes
    evidence_digest: str

    @property
    def simulated(self) -> bool:
        return self.kind == "simulated"

    @property
    def label(self) -> str:
        return "SIMULATED" if self.simulated else f"{self.kind} {self.product}"


def encode_claims(worker: AttestedWorker, evidence_digest: str, policy_digest: str) -> bytes:
    claims = {
        "version": VERSION,
        # First, so that it is seen in any dump of the certificate.
        "label": worker.label,
        "evidence": evidence_digest,
        "nonce": worker.challenge.nonce.hex(),
        "policy": policy_digest,
        "worker": {
            **{name: getattr(worker, name) for name in _TEXTS},
            "tcb": dict(worker.tcb),
            "debug": worker.debug,
            "guest": dict(worker.guest),
            "lists": [[one.issuer, one.made.timestamp()] for one in worker.lists],
            "verified_at": worker.verified_at.timestamp(),
        },
    }
    return json.dumps(claims, separators=(",", ":")).encode()


def claims_in(certificate: x509.Certificate) -> ClaimedWorker | None:
    """What a certificate claims of an attestation; None if nothing. ValueError: not readable."""
    try:
        extension = certificate.extensions.get_extension_for_oid(ATTESTATION_OID).value
    except x509.ExtensionNotFound:
        return None
    return parse_claims(extension.public_bytes())


def parse_claims(data: bytes) -> ClaimedWorker:
    if len(data) > MAX_CLAIM_BYTES:
        raise ValueError(f"its attestation has more than {MAX_CLAIM_BYTES} bytes")
    try:
        return _parse(json.loads(data.decode()))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, OSError) as problem:
        raise ValueError("its attestation cannot be read") from problem


def _parse(claims: dict[str, Any]) -> ClaimedWorker:
    worker, digest = claims["worker"], claims["evidence"]
    if claims["version"] != VERSION or _DIGEST.fullmatch(digest) is None:
        raise ValueError
    texts = {name: worker[name] for name in _TEXTS}
    if not all(isinstance(text, str) and len(text) <= _MAX_TEXT for text in texts.values()):
        raise ValueError
    if type(worker["debug"]) is not bool:
        raise ValueError
    return ClaimedWorker(
        **texts,
        tcb=_numbers(worker["tcb"]),
        debug=worker["debug"],
        guest=_numbers(worker["guest"]),
        lists=tuple(ListSeen(str(issuer), _time(made)) for issuer, made in worker["lists"]),
        verified_at=_time(worker["verified_at"]),
        nonce=bytes.fromhex(claims["nonce"]),
        evidence_digest=digest,
    )


def _numbers(value: Any) -> dict[str, int]:
    if not all(isinstance(name, str) and type(number) is int for name, number in value.items()):
        raise ValueError
    return dict(value)


def _time(seconds: Any) -> datetime:
    return datetime.fromtimestamp(float(seconds), UTC)
