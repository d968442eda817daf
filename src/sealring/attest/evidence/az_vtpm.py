"""A TPM inside a confidential virtual machine: Azure's form of SEV-SNP and of TDX.

The guest sees no report of its own making. At boot, the paravisor in front of it asks for one whose
report data is the hash of a JSON text that holds the virtual TPM's attestation key. So the hardware
vouches for that key, and the key's quote for the nonce, the worker and the PCRs. On TDX, Azure's
host turns the report into a quote.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Final

from sealring.attest.evidence.chains import VerifiedChain
from sealring.attest.evidence.ecdsa import check_spelling
from sealring.attest.evidence.evidence import Challenge, Evidence
from sealring.attest.evidence.intel import canonical_quote
from sealring.attest.evidence.intel import verify_quote as verify_td_quote
from sealring.attest.evidence.intel_collateral import TDX
from sealring.attest.evidence.paravisor import (
    SNP,
    HclReport,
    canonical_hcl_report,
    parse_hcl_report,
)
from sealring.attest.evidence.snp import Report, claims_of, verify_report
from sealring.attest.evidence.tpm.verify import events, measured, registers, verify_quote
from sealring.attest.evidence.trust import Trust
from sealring.attest.evidence.worker import Claims
from sealring.errors import MalformedEvidence, NotBound, UnknownEvidence

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
    if hcl.kind == SNP:
        raise UnknownEvidence(f"the paravisor's report is of SNP: that is {SNP_KIND} evidence")
    check_spelling(raw, canonical_hcl_report(raw), "the paravisor's report")
    check_spelling(td_quote, canonical_quote(td_quote), "the quote")
    launched, bound = verify_td_quote(td_quote, TDX, trust)
    if bound != _hash(hcl):
        raise NotBound("the TDX quote is not about these claims of the paravisor")
    return _booted(evidence, challenge, hcl, launched, (signed, signature, values, log, ima))


def verify_hcl_report(
    raw: bytes, chain: tuple[bytes, ...], trust: Trust
) -> tuple[Report, VerifiedChain, str, HclReport]:
    """That AMD's hardware vouches for the virtual TPM's key; not yet for whom it signed."""
    hcl = parse_hcl_report(raw)
    if hcl.kind != SNP:
        raise UnknownEvidence(f"the paravisor's report is not of SNP: that is {TDX_KIND} evidence")
    report, verified, product = verify_report(hcl.report, chain, trust)
    if report.report_data != _hash(hcl):
        raise NotBound("the SNP report is not about these claims of the paravisor")
    return report, verified, product, hcl


def _booted(
    evidence: Evidence,
    challenge: Challenge | None,
    hcl: HclReport,
    launched: Claims,
    quoted: tuple[bytes, bytes, bytes, bytes, bytes],
) -> Claims:
    """The launch, with what the guest itself booted, by the quote of its virtual TPM."""
    signed, signature, values, log, ima = quoted
    quote, pcrs = verify_quote(signed, signature, hcl.key, values)
    evidence.check_bound(quote.extra_data, challenge, "the virtual TPM's quote")
    return replace(
        launched,
        registers={**launched.registers, **registers(pcrs)},
        events=events(log, pcrs, quote.bank),
        **measured(ima, pcrs, quote.bank),
        guest={**launched.guest, "insecure_boot": int(not hcl.secure_boot)},
    )


def _hash(hcl: HclReport) -> bytes:
    return hashlib.sha256(hcl.text).digest().ljust(64, b"\0")
