"""A virtual TPM that an SNP report vouches for, minted here and as Azure made it."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from sealring.bench.minting import tpm
from sealring.bench.minting.amd import MEASUREMENT, PLAIN_POLICY, Amd
from sealring.bench.minting.azure import AzureGuest
from sealring.bench.minting.certificates import CHALLENGE, DAY, NOW
from sealring.errors import (
    ChainExpired,
    ChainRevoked,
    ForgedEvidence,
    MalformedEvidence,
    NotBound,
    UnknownEvidence,
    UntrustedChain,
)
from sealring.identity.attestation import (
    Challenge,
    Evidence,
    Trust,
)
from sealring.identity.attestation.az_snp_vtpm import verify_hcl_report
from sealring.identity.attestation.tpm.verify import verify_quote
from tests.identity.attestation.judging import Judge
from tests.identity.attestation.vectors import vectors

AMD = Amd()
GUEST = AzureGuest(AMD)
GOOD = GUEST.evidence()
THEN = datetime(2025, 6, 1, tzinfo=UTC)
JUDGE = Judge(lambda: CHALLENGE, AMD.trust)
verify, refused = JUDGE.verify, JUDGE.refused


def changed(**parts: bytes) -> Evidence:
    return replace(GOOD, parts={**GOOD.parts, **parts})


def test_true_evidence_is_an_attested_worker() -> None:
    worker = verify(GOOD)
    assert worker.label == "az-snp-vtpm Milan"
    assert worker.measurement == MEASUREMENT.hex()
    assert worker.registers["pcr4"] == tpm.pcr_values(tpm.BOOT)[4].hex()
    assert worker.guest["insecure_boot"] == 0
    assert verify(AzureGuest(AMD, policy=PLAIN_POLICY | 1 << 19).evidence()).debug


@pytest.mark.parametrize("part", ["hcl_report", "quote", "signature", "pcrs"])
def test_no_byte_of_any_part_can_be_changed(part: str) -> None:
    raw = GOOD.parts[part]
    for at in range(0, len(raw), 13):
        bent = raw[:at] + bytes([raw[at] ^ 0x40]) + raw[at + 1 :]
        with pytest.raises((ForgedEvidence, MalformedEvidence, UnknownEvidence, NotBound)):
            verify(changed(**{part: bent}))


def test_cut_and_extended_reports() -> None:
    bare = GUEST.hcl_report(pad=0)
    for raw in (bare[:-1], bare[:100], bare + b"\1", bare + bytes(50) + b"\1"):
        refused(MalformedEvidence, changed(hcl_report=raw))
    refused(UnknownEvidence, changed(hcl_report=GUEST.hcl_report(version=2)))


def test_a_key_that_the_report_is_not_about() -> None:
    other = AzureGuest(AMD)
    spliced = other.evidence()
    mixed = {**spliced.parts, "hcl_report": GUEST.hcl_report(other.text)}
    assert "not about these claims" in refused(NotBound, replace(spliced, parts=mixed))
    refused(ForgedEvidence, changed(hcl_report=other.hcl_report()))


def test_an_old_nonce_and_another_workers_key() -> None:
    for other in (
        Challenge(bytes(32), CHALLENGE.public_key),
        Challenge(CHALLENGE.nonce, b"another"),
    ):
        refused(NotBound, replace(GUEST.evidence(other), challenge=CHALLENGE))


def test_a_quote_of_another_kind_of_evidence_does_not_pass() -> None:
    values = {pcr: tpm.pcr_values(tpm.BOOT)[pcr] for pcr in tpm.PCRS}
    message = tpm.quote(values, CHALLENGE.report_data("tpm")[:32])
    refused(NotBound, changed(quote=message, signature=tpm.sign(GUEST.key, message)))


def test_chains() -> None:
    refused(UntrustedChain, replace(GOOD, chain=Amd().chain))
    refused(ChainExpired, GOOD, AMD.trust(now=NOW + 101 * DAY))
    refused(ChainRevoked, GOOD, AMD.trust(AMD.revocation_list(AMD.ask)))


def test_claims_without_one_key() -> None:
    for text in (b"[]", b"{}", b'{"keys": 3}', GUEST.text.replace(b"RSA", b"oct")):
        odd = copy.copy(GUEST)
        odd.report = AMD.report(report_data=hashlib.sha256(text).digest().ljust(64, b"\0"))
        refused(MalformedEvidence, changed(hcl_report=odd.hcl_report(text)))


def real() -> tuple[bytes, tuple[bytes, ...], dict[str, bytes]]:
    fields = json.loads((vectors("vtpm-snp") / "az-snp-vtpm_evidence-v2.json").read_bytes())
    issuers = x509.load_pem_x509_certificates((vectors("snp") / "milan.testcer").read_bytes())[:2]
    chain = (_loose(fields["vcek"]), *(one.public_bytes(Encoding.DER) for one in issuers))
    quote = fields["tpm_quote"]
    # The file holds the RSA signature alone, without the TPM's words on which scheme it is.
    signature = bytes.fromhex("0014000b0100" + quote["signature"])
    values = bytes.fromhex("".join(quote["pcrs"]))
    parts = {"quote": bytes.fromhex(quote["message"]), "signature": signature, "pcrs": values}
    return _loose(fields["hcl_report"]), chain, parts


def _loose(text: str) -> bytes:
    return base64.urlsafe_b64decode(
        text.replace("+", "-").replace("/", "_") + "=" * (-len(text) % 4)
    )


def test_real_evidence_of_azure_verifies() -> None:
    raw, chain, parts = real()
    report, _, product, hcl = verify_hcl_report(raw, chain, Trust.pinned(now=THEN))
    assert (product, report.debug, hcl.secure_boot) == ("Milan", False, True)
    quote, pcrs = verify_quote(parts["quote"], parts["signature"], hcl.key, parts["pcrs"])
    assert len(quote.pcrs) == 24
    assert set(range(24)) - set(pcrs) == {16, 23}


def test_its_broken_variants_do_not() -> None:
    raw, chain, parts = real()
    trust = Trust.pinned(now=THEN)
    for at in range(0, len(raw), 11):
        bent = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        with pytest.raises((ForgedEvidence, MalformedEvidence, UnknownEvidence, NotBound)):
            verify_hcl_report(bent, chain, trust)
    key = verify_hcl_report(raw, chain, trust)[3].key
    for name, part in parts.items():
        for at in range(0, len(part), 17):
            bent = part[:at] + bytes([part[at] ^ 1]) + part[at + 1 :]
            broken = {**parts, name: bent}
            with pytest.raises((ForgedEvidence, MalformedEvidence, UnknownEvidence)):
                verify_quote(broken["quote"], broken["signature"], key, broken["pcrs"])
    with pytest.raises(ChainExpired):
        verify_hcl_report(raw, chain, Trust.pinned(now=datetime(2035, 1, 1, tzinfo=UTC)))
