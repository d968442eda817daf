"""The report that Azure's paravisor leaves in a guest's virtual TPM, as bytes.

It holds a hardware report (SNP's, or a TDX report that is no quote yet), and a JSON text with the
virtual TPM's attestation key, whose hash is that report's report data. Versions 1 and 2 differ in
nothing that is read here.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric import rsa

from sealring.attest.evidence.cursor import Cursor
from sealring.attest.evidence.snp import REPORT_BYTES, canonical_report
from sealring.errors import MalformedEvidence, UnknownEvidence
from sealring.formats.strict import read_object

SNP, TDX = 2, 4
HEAD_BYTES: Final = 32
_MAGIC: Final = b"HCLA"
_VERSIONS: Final = (1, 2)
_CLAIMS_VERSION, _ATTESTATION, _SHA256 = 1, 2, 1
_AK: Final = "HCLAkPub"


@dataclass(frozen=True, slots=True)
class HclReport:
    kind: int
    """SNP or TDX."""
    report: bytes
    """The hardware's, in the place of SNP's."""
    text: bytes
    """What the report data is the hash of."""
    key: rsa.RSAPublicKey
    secure_boot: bool


def parse_hcl_report(data: bytes) -> HclReport:
    cursor = Cursor(data, "the paravisor's report", "little")
    if cursor.take(4) != _MAGIC:
        raise MalformedEvidence("the paravisor's report does not begin with HCLA")
    version, size, request = cursor.number(4), cursor.number(4), cursor.number(4)
    if version not in _VERSIONS or request != _ATTESTATION:
        raise UnknownEvidence(f"a paravisor's report of version {version}, type {request}")
    if any(cursor.take(16)):  # A status and what is reserved.
        raise MalformedEvidence("the paravisor reports a failure, or fields that are not known")
    report = cursor.take(REPORT_BYTES)
    inner, claims_version, kind, hashed = (cursor.number(4) for _ in range(4))
    if (claims_version, hashed) != (_CLAIMS_VERSION, _SHA256) or kind not in (SNP, TDX):
        raise UnknownEvidence("the paravisor's claims are of a version, type or hash not known")
    text = cursor.sized(4)
    if inner != 20 + len(text) or size != HEAD_BYTES + REPORT_BYTES + inner:
        raise MalformedEvidence("the lengths in the paravisor's report do not agree")
    if any(cursor.take(cursor.left)):
        raise MalformedEvidence("bytes after the paravisor's claims are not zero")
    claims = read_object(text, MalformedEvidence("the paravisor's claims are not a JSON object"))
    settings = claims.get("vm-configuration")
    secure = isinstance(settings, dict) and settings.get("secure-boot") is True
    return HclReport(kind, report, text, _key(claims), secure)


def canonical_hcl_report(raw: bytes) -> bytes:
    """As a worker sends it: whatever no signature covers has one value.

    That is the version, of which nothing depends; the zeros at the end; and a TDX report, which the
    host has turned into a quote that is sent beside this.
    """
    hcl = parse_hcl_report(raw)
    report = canonical_report(hcl.report) if hcl.kind == SNP else bytes(REPORT_BYTES)
    head = _MAGIC + _VERSIONS[0].to_bytes(4, "little") + raw[8:HEAD_BYTES]
    size = int.from_bytes(raw[8:12], "little")
    return head + report + raw[HEAD_BYTES + REPORT_BYTES : size]


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
