"""A TPM inside a confidential virtual machine: Azure's form of SEV-SNP.

The guest sees no SNP report of its own making. At boot, the paravisor in front of it asks for one
whose report data is the hash of a JSON text that holds the virtual TPM's attestation key. So AMD's
hardware vouches for that key, and the key's quote for the nonce, the worker and the PCRs.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric import rsa

from sealring.errors import MalformedEvidence, NotBound, UnknownEvidence
from sealring.identity.attestation.chains import VerifiedChain
from sealring.identity.attestation.cursor import Cursor
from sealring.identity.attestation.ecdsa import check_spelling
from sealring.identity.attestation.evidence import Challenge, Evidence
from sealring.identity.attestation.roots import Trust
from sealring.identity.attestation.snp import (
    REPORT_BYTES,
    Report,
    canonical_report,
    claims_of,
    verify_report,
)
from sealring.identity.attestation.tpm.verify import events, registers, verify_quote
from sealring.identity.attestation.worker import Claims

KIND: Final = "az-snp-vtpm"
_MAGIC: Final = b"HCLA"
_VERSION: Final = 1
_SNP: Final = 2
_SHA256: Final = 1
_HEAD_BYTES: Final = 32
_AK: Final = "HCLAkPub"


@dataclass(frozen=True, slots=True)
class HclReport:
    """The paravisor's report: AMD's, and the text that its report data is the hash of."""

    report: bytes
    text: bytes
    key: rsa.RSAPublicKey
    secure_boot: bool


def parse_hcl_report(data: bytes) -> HclReport:
    cursor = Cursor(data, "the paravisor's report", "little")
    if cursor.take(4) != _MAGIC:
        raise MalformedEvidence("the paravisor's report does not begin with HCLA")
    version, size, request = cursor.number(4), cursor.number(4), cursor.number(4)
    if (version, request) != (_VERSION, _SNP):
        raise UnknownEvidence(f"a paravisor's report of version {version}, type {request}")
    if any(cursor.take(16)):  # A status and what is reserved.
        raise MalformedEvidence("the paravisor reports a failure, or fields that are not known")
    report = cursor.take(REPORT_BYTES)
    inner, data_version, kind, hashed = (cursor.number(4) for _ in range(4))
    if (data_version, kind, hashed) != (_VERSION, _SNP, _SHA256):
        raise UnknownEvidence("the paravisor's claims are of a version, type or hash not known")
    text = cursor.sized(4)
    if inner != 20 + len(text) or size != 32 + REPORT_BYTES + inner:
        raise MalformedEvidence("the lengths in the paravisor's report do not agree")
    if any(cursor.take(cursor.left)):
        raise MalformedEvidence("bytes after the paravisor's claims are not zero")
    claims = _json(text)
    settings = claims.get("vm-configuration")
    secure = isinstance(settings, dict) and settings.get("secure-boot") is True
    return HclReport(report, text, _key(claims), secure)


def canonical_hcl_report(raw: bytes) -> bytes:
    """As a worker sends it."""
    head, report = raw[:_HEAD_BYTES], raw[_HEAD_BYTES : _HEAD_BYTES + REPORT_BYTES]
    return head + canonical_report(report) + raw[_HEAD_BYTES + REPORT_BYTES :]


def verify_az_snp_vtpm(evidence: Evidence, challenge: Challenge | None, trust: Trust) -> Claims:
    raw, signed, signature, values, log = evidence.only(
        "hcl_report", "quote", "signature", "pcrs", optional=("event_log",)
    )
    check_spelling(raw, canonical_hcl_report(raw), "the SNP report")
    report, chain, product, hcl = verify_hcl_report(raw, evidence.chain, trust)
    quote, pcrs = verify_quote(signed, signature, hcl.key, values)
    evidence.check_bound(quote.extra_data, challenge, "the virtual TPM's quote")
    claims = claims_of(report, chain, product)
    return replace(
        claims,
        registers={**claims.registers, **registers(pcrs)},
        events=events(log, pcrs),
        guest={**claims.guest, "insecure_boot": int(not hcl.secure_boot)},
    )


def verify_hcl_report(
    raw: bytes, chain: tuple[bytes, ...], trust: Trust
) -> tuple[Report, VerifiedChain, str, HclReport]:
    """That AMD's hardware vouches for the virtual TPM's key; not yet for whom it signed."""
    hcl = parse_hcl_report(raw)
    report, verified, product = verify_report(hcl.report, chain, trust)
    if report.report_data != hashlib.sha256(hcl.text).digest().ljust(64, b"\0"):
        raise NotBound("the SNP report is not about these claims of the paravisor")
    return report, verified, product, hcl


def _json(text: bytes) -> dict[str, Any]:
    try:
        claims = json.loads(text.decode())
    except (ValueError, RecursionError):
        claims = None
    if not isinstance(claims, dict):
        raise MalformedEvidence("the paravisor's claims are not a JSON object")
    return claims


def _key(claims: dict[str, Any]) -> rsa.RSAPublicKey:
    keys = claims.get("keys")
    named = [one for one in keys if isinstance(one, dict)] if isinstance(keys, list) else []
    found = [one for one in named if one.get("kid") == _AK]
    if len(found) != 1 or found[0].get("kty") != "RSA":
        raise MalformedEvidence(f"the paravisor's claims do not hold one RSA key named {_AK}")
    numbers = [_number(found[0].get(name)) for name in ("e", "n")]
    if not 2048 <= numbers[1].bit_length() <= 4096:
        raise UnknownEvidence("the virtual TPM's RSA key has a size that is not accepted")
    try:
        return rsa.RSAPublicNumbers(*numbers).public_key()
    except ValueError:
        raise MalformedEvidence("the virtual TPM's key is no RSA key") from None


def _number(text: Any) -> int:
    if not isinstance(text, str) or not text.isascii():
        raise MalformedEvidence("a number of the virtual TPM's key is missing")
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise MalformedEvidence("a number of the virtual TPM's key is not base64url") from None
    return int.from_bytes(raw, "big")
