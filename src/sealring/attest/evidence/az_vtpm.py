"""A TPM inside a confidential virtual machine: Azure's form of SEV-SNP and of TDX.

The guest cannot ask for a report itself. At boot, the paravisor, which runs below the guest, asks
for a report. Its report data is the hash of a JSON text that holds the virtual TPM's attestation
key. So the hardware vouches for that key, and a quote by the key vouches for the nonce, the worker
and the PCRs. On TDX, Azure's host turns the report into a quote.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric import rsa

from sealring.attest.evidence.chains import VerifiedChain
from sealring.attest.evidence.encoding import (
    Cursor,
    at,
    check_spelling,
    from_base64,
    not_bound,
    read_structure,
    unknown_evidence,
)
from sealring.attest.evidence.evidence import Challenge, Evidence
from sealring.attest.evidence.intel import TDX_TCB, canonical_quote, tdx_registers
from sealring.attest.evidence.intel import verify_quote as verify_td_quote
from sealring.attest.evidence.rules import TableForm, measurements, refused_unless
from sealring.attest.evidence.snp import (
    REPORT_BYTES,
    Report,
    canonical_report,
    claims_of,
    snp_form,
    verify_report,
)
from sealring.attest.evidence.tpm.verify import booted, logged, registers, verify_quote
from sealring.attest.evidence.trust import TDX, Trust
from sealring.attest.evidence.worker import Claims
from sealring.errors import MalformedEvidence
from sealring.formats.strict import read_object

HCL_SNP, HCL_TDX = 2, 4
HEAD_BYTES: Final = 32
_CLAIMS_AT: Final = HEAD_BYTES + REPORT_BYTES
_MAGIC: Final = b"HCLA"
_VERSIONS: Final = (1, 2)
_CLAIMS_VERSION, _ATTESTATION, _SHA256 = 1, 2, 1
_AK: Final = "HCLAkPub"


@dataclass(frozen=True, slots=True)
class _Head:
    """The fields before the paravisor's claims."""

    magic: bytes = at(0, 4)
    version: int = at(4, 4)
    size: int = at(8, 4)
    request: int = at(12, 4)
    status_and_reserved: bytes = at(16, 16, zero=True)
    report: bytes = at(HEAD_BYTES, REPORT_BYTES)
    inner: int = at(_CLAIMS_AT, 4)
    claims_version: int = at(_CLAIMS_AT + 4, 4)
    kind: int = at(_CLAIMS_AT + 8, 4)
    hashed: int = at(_CLAIMS_AT + 12, 4)


@dataclass(frozen=True, slots=True)
class HclReport:
    kind: int
    """HCL_SNP or HCL_TDX."""
    report: bytes
    """The hardware's report. Its place is that of SNP's report, also for TDX."""
    text: bytes
    """The JSON text whose hash is the report data."""
    key: rsa.RSAPublicKey
    secure_boot: bool

    @property
    def bound(self) -> bytes:
        """The report data that the hardware must have signed."""
        return hashlib.sha256(self.text).digest().ljust(64, b"\0")


def parse_hcl_report(data: bytes) -> HclReport:
    head = read_structure(_Head, data, "the paravisor's report")
    if head.magic != _MAGIC:
        raise MalformedEvidence("the paravisor's report does not begin with HCLA")
    if head.version not in _VERSIONS or head.request != _ATTESTATION:
        raise unknown_evidence(f"a paravisor's report of version {head.version}, {head.request}")
    known = (head.claims_version, head.hashed) == (_CLAIMS_VERSION, _SHA256)
    if not known or head.kind not in (HCL_SNP, HCL_TDX):
        raise unknown_evidence("the paravisor's claims are of a version, type or hash not known")
    cursor = Cursor(data[_CLAIMS_AT + 16 :], "the paravisor's claims", "little")
    text = cursor.sized(4)
    if head.inner != 20 + len(text) or head.size != _CLAIMS_AT + head.inner:
        raise MalformedEvidence("the lengths in the paravisor's report do not agree")
    if any(cursor.take(cursor.left)):
        raise MalformedEvidence("bytes after the paravisor's claims are not zero")
    claims = read_object(text, MalformedEvidence("the paravisor's claims are not a JSON object"))
    settings = claims.get("vm-configuration")
    secure = isinstance(settings, dict) and settings.get("secure-boot") is True
    return HclReport(head.kind, head.report, text, _key(claims), secure)


def canonical_hcl_report(raw: bytes) -> bytes:
    """The report as a worker sends it: every part that no signature covers has one fixed value.

    These parts are the version, on which nothing depends; the zeros at the end; and a TDX report,
    because the host has turned it into a quote, which is sent next to this.
    """
    hcl = parse_hcl_report(raw)
    report = canonical_report(hcl.report) if hcl.kind == HCL_SNP else bytes(REPORT_BYTES)
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
        raise unknown_evidence("the virtual TPM's RSA key has a size that is not accepted")
    try:
        return rsa.RSAPublicNumbers(*numbers).public_key()
    except ValueError:
        raise MalformedEvidence("the virtual TPM's key is no RSA key") from None


def _number(text: Any) -> int:
    refusal = MalformedEvidence("a number of the virtual TPM's key is not base64url")
    return int.from_bytes(from_base64(text, refusal, url=True), "big")


SNP_KIND: Final = "az-snp-vtpm"
TDX_KIND: Final = "az-tdx-vtpm"


def verify_az_snp_vtpm(evidence: Evidence, challenge: Challenge | None, trust: Trust) -> Claims:
    raw, signed, signature, values, log, ima = evidence.only(
        "hcl_report", "quote", "signature", "pcrs", optional=("event_log", "ima_log")
    )
    check_spelling(raw, canonical_hcl_report(raw), "the paravisor's report")
    report, chain, product, hcl = verify_hcl_report(raw, evidence.chain, trust)
    launched = claims_of(report, chain, product)
    return _booted(evidence, challenge, hcl, launched, (signed, signature, values, log, ima))


def verify_az_tdx_vtpm(evidence: Evidence, challenge: Challenge | None, trust: Trust) -> Claims:
    raw, td_quote, signed, signature, values, log, ima = evidence.only(
        "hcl_report", "td_quote", "quote", "signature", "pcrs", optional=("event_log", "ima_log")
    )
    if evidence.chain:
        raise MalformedEvidence("an Intel quote holds its chain itself")
    hcl = parse_hcl_report(raw)
    if hcl.kind == HCL_SNP:
        raise unknown_evidence(f"the paravisor's report is of SNP: that is {SNP_KIND} evidence")
    check_spelling(raw, canonical_hcl_report(raw), "the paravisor's report")
    check_spelling(td_quote, canonical_quote(td_quote), "the quote")
    launched, bound = verify_td_quote(td_quote, TDX, trust)
    if bound != hcl.bound:
        raise not_bound("the TDX quote is not about these claims of the paravisor")
    return _booted(evidence, challenge, hcl, launched, (signed, signature, values, log, ima))


def verify_hcl_report(
    raw: bytes, chain: tuple[bytes, ...], trust: Trust
) -> tuple[Report, VerifiedChain, str, HclReport]:
    """Checks that AMD's hardware vouches for the virtual TPM's key. The caller checks its quote."""
    hcl = parse_hcl_report(raw)
    if hcl.kind != HCL_SNP:
        raise unknown_evidence(f"the paravisor's report is not of SNP: that is {TDX_KIND} evidence")
    report, verified, product = verify_report(hcl.report, chain, trust)
    if report.report_data != hcl.bound:
        raise not_bound("the SNP report is not about these claims of the paravisor")
    return report, verified, product, hcl


def _booted(
    evidence: Evidence,
    challenge: Challenge | None,
    hcl: HclReport,
    launched: Claims,
    quoted: tuple[bytes, bytes, bytes, bytes, bytes],
) -> Claims:
    """Adds to the launch's claims what the guest itself booted, by its virtual TPM's quote."""
    signed, signature, values, log, ima = quoted
    quote, pcrs = verify_quote(signed, signature, hcl.key, values)
    evidence.check_bound(quote.extra_data, challenge, "the virtual TPM's quote")
    return replace(
        launched,
        registers={**launched.registers, **registers(pcrs)},
        **logged(log, ima, pcrs, quote.bank),
        guest={**launched.guest, "insecure_boot": int(not hcl.secure_boot)},
    )


# The launch measurement is the paravisor's. Only PCRs show what the guest itself booted.
_BOOTED, _NEEDS = booted(4, 7)
_SECURE_BOOT: Final = refused_unless(
    "secure_boot", "insecure_boot", "guests pass that booted with Secure Boot off.", strict=True
)
SNP_FORM: Final = snp_form(_BOOTED, (_SECURE_BOOT,), _NEEDS)
TDX_FORM: Final = TableForm(
    rules=(measurements(48), tdx_registers(), *_BOOTED, *TDX_TCB, _SECURE_BOOT),
    needs=_NEEDS,
    one_of=(("measurements",), ("pcrs", "events")),
)
