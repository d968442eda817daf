"""A virtual TPM that an SNP report vouches for: made by the tests, and real ones of Azure."""

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

from sealring.attest.evidence import (
    Challenge,
    Evidence,
    Trust,
    describe_evidence,
)
from sealring.attest.evidence.az_vtpm import (
    HCL_SNP,
    HCL_TDX,
    canonical_hcl_report,
    parse_hcl_report,
    verify_hcl_report,
)
from sealring.attest.evidence.chains import load_certificate
from sealring.attest.evidence.intel import canonical_quote, parse_quote
from sealring.attest.evidence.snp import check_report_signature, parse_report
from sealring.attest.evidence.tpm.verify import verify_quote
from sealring.errors import (
    AttestationError,
    ForgedEvidence,
    MalformedEvidence,
    UntrustedChain,
)
from tests.attest.evidence.judging import UNTRUE, Judge
from tests.attest.evidence.vectors import vectors
from tests.attest.minting import CHALLENGE, DAY, NOW, tpm
from tests.attest.minting.amd import MEASUREMENT, PLAIN_POLICY, Amd
from tests.attest.minting.intel import MRTD, Intel
from tests.attest.minting.tpm import AzureGuest
from tests.codes import coded

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
@pytest.mark.threat("E1")
def test_no_byte_of_any_part_can_be_changed(part: str) -> None:
    raw = GOOD.parts[part]
    for at in range(0, len(raw), 13):
        bent = raw[:at] + bytes([raw[at] ^ 0x40]) + raw[at + 1 :]
        with pytest.raises(AttestationError, check=coded(*UNTRUE)):
            verify(changed(**{part: bent}))


@pytest.mark.threat("E1")
def test_cut_and_extended_reports() -> None:
    bare = GUEST.hcl_report(pad=0)
    for raw in (bare[:-1], bare[:100], bare + b"\1", bare + bytes(50) + b"\1"):
        refused("evidence.malformed_evidence", changed(hcl_report=raw))
    refused("evidence.unknown_evidence", changed(hcl_report=GUEST.hcl_report(version=3)))
    second = canonical_hcl_report(GUEST.hcl_report(version=2))
    assert verify(changed(hcl_report=second)).label == "az-snp-vtpm Milan"


def test_a_key_that_the_report_is_not_about() -> None:
    other = AzureGuest(AMD)
    spliced = other.evidence()
    mixed = {**spliced.parts, "hcl_report": GUEST.hcl_report(other.text)}
    assert "not about these claims" in refused("evidence.not_bound", replace(spliced, parts=mixed))
    refused("evidence.forged_evidence", changed(hcl_report=other.hcl_report()))


@pytest.mark.threat("E14")
def test_an_old_nonce_and_another_workers_key() -> None:
    for other in (
        Challenge(bytes(32), CHALLENGE.public_key),
        Challenge(CHALLENGE.nonce, b"another"),
    ):
        refused("evidence.not_bound", replace(GUEST.evidence(other), challenge=CHALLENGE))


def test_a_quote_of_another_kind_of_evidence_does_not_pass() -> None:
    values = {pcr: tpm.pcr_values(tpm.BOOT)[pcr] for pcr in tpm.PCRS}
    message = tpm.quote(values, CHALLENGE.report_data("tpm")[:32])
    refused("evidence.not_bound", changed(quote=message, signature=tpm.sign(GUEST.key, message)))


@pytest.mark.threat("E12")
def test_chains() -> None:
    refused("evidence.untrusted_chain", replace(GOOD, chain=Amd().chain))
    refused("evidence.chain_expired", GOOD, AMD.trust(now=NOW + 101 * DAY))
    refused("evidence.chain_revoked", GOOD, AMD.trust(AMD.revocation_list(AMD.ask)))


def test_claims_without_one_key() -> None:
    for text in (b"[]", b"{}", b'{"keys": 3}', GUEST.text.replace(b"RSA", b"oct")):
        odd = copy.copy(GUEST)
        odd.report = AMD.report(report_data=hashlib.sha256(text).digest().ljust(64, b"\0"))
        refused("evidence.malformed_evidence", changed(hcl_report=odd.hcl_report(text)))


def real() -> tuple[bytes, tuple[bytes, ...], dict[str, bytes]]:
    fields = json.loads((vectors("vtpm-snp") / "az-snp-vtpm_evidence-v2.json").read_bytes())
    issuers = x509.load_pem_x509_certificates((vectors("snp") / "milan.testcer").read_bytes())[:2]
    chain = (_loose(fields["vcek"]), *(one.public_bytes(Encoding.DER) for one in issuers))
    quote = fields["tpm_quote"]
    # The file holds only the RSA signature, without the TPM's header that names the scheme.
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
    report, _, product, hcl = verify_hcl_report(raw, chain, Trust(THEN))
    assert (product, report.debug, hcl.secure_boot) == ("Milan", False, True)
    quote, pcrs = verify_quote(parts["quote"], parts["signature"], hcl.key, parts["pcrs"])
    assert len(quote.pcrs) == 24
    assert set(range(24)) - set(pcrs) == {16, 23}


@pytest.mark.threat("E1")
def test_its_broken_variants_do_not() -> None:
    raw, chain, parts = real()
    trust = Trust(THEN)
    for at in range(0, len(raw), 11):
        bent = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        with pytest.raises(AttestationError, check=coded(*UNTRUE)):
            verify_hcl_report(bent, chain, trust)
    key = verify_hcl_report(raw, chain, trust)[3].key
    for name, part in parts.items():
        for at in range(0, len(part), 17):
            bent = part[:at] + bytes([part[at] ^ 1]) + part[at + 1 :]
            broken = {**parts, name: bent}
            with pytest.raises((ForgedEvidence, MalformedEvidence)):
                verify_quote(broken["quote"], broken["signature"], key, broken["pcrs"])
    with pytest.raises(UntrustedChain, check=coded("evidence.chain_expired")):
        verify_hcl_report(raw, chain, Trust(datetime(2035, 1, 1, tzinfo=UTC)))


def genoa() -> tuple[bytes, tuple[bytes, ...], dict[str, bytes]]:
    """Real evidence in version 2 of the paravisor's form."""
    fields = json.loads((vectors("vtpm-snp") / "az-snp-vtpm_evidence-genoa.json").read_bytes())
    quote = fields["quote"]
    body = "".join(fields["vcek"].strip().splitlines()[1:-1])
    raw = _loose(fields["report"]) if isinstance(fields["report"], str) else bytes(fields["report"])
    parts = {
        "quote": bytes(quote["message"]),
        "signature": bytes.fromhex("0014000b0100") + bytes(quote["signature"]),
        "pcrs": b"".join(map(bytes, quote["pcrs"])),
    }
    return raw, (base64.b64decode(body),), parts


def test_a_real_genoa_of_azure_is_read_and_its_quote_verifies() -> None:
    raw, chain, parts = genoa()
    hcl = parse_hcl_report(raw)
    report = parse_report(hcl.report)
    assert (hcl.kind, hcl.secure_boot) == (HCL_SNP, True)
    assert (report.debug, report.guest_svn) == (False, 65547)
    assert report.report_data[:32] == hashlib.sha256(hcl.text).digest()
    _, pcrs = verify_quote(parts["quote"], parts["signature"], hcl.key, parts["pcrs"])
    assert len(pcrs) == 22
    # The file holds only the chip's certificate, without AMD's above it.
    check_report_signature(report, load_certificate(chain[0]))
    assert report.tcb[6] == 23
    with pytest.raises(UntrustedChain):
        verify_hcl_report(raw, chain, Trust(THEN))


INTEL = Intel()
TD_GUEST = AzureGuest(INTEL)
TD_GOOD = TD_GUEST.evidence()
TD_JUDGE = Judge(lambda: CHALLENGE, INTEL.trust)


def td_changed(**parts: bytes) -> Evidence:
    return replace(TD_GOOD, parts={**TD_GOOD.parts, **parts})


def test_a_virtual_tpm_that_a_tdx_quote_vouches_for() -> None:
    worker = TD_JUDGE.verify(TD_GOOD)
    assert (worker.label, worker.measurement) == ("az-tdx-vtpm TDX", MRTD.hex())
    assert worker.registers["pcr4"] == tpm.pcr_values(tpm.BOOT)[4].hex()
    assert worker.registers["rtmr1"] == "a1" * 48
    assert (worker.tcb_status, worker.guest["insecure_boot"]) == ("UpToDate", 0)
    for other in (Challenge(bytes(32), CHALLENGE.public_key), Challenge(CHALLENGE.nonce, b"x")):
        TD_JUDGE.refused(
            "evidence.not_bound", replace(TD_GUEST.evidence(other), challenge=CHALLENGE)
        )


@pytest.mark.parametrize("part", ["td_quote", "quote", "signature", "pcrs"])
def test_no_byte_of_tdx_evidence_can_be_changed(part: str) -> None:
    raw = TD_GOOD.parts[part]
    for at in range(0, len(raw), 37):
        bent = raw[:at] + bytes([raw[at] ^ 0x40]) + raw[at + 1 :]
        with pytest.raises(AttestationError):
            TD_JUDGE.verify(td_changed(**{part: bent}))


@pytest.mark.threat("E1")
def test_what_no_signature_covers_in_the_paravisors_report_has_one_value() -> None:
    """Changes every byte of the head and of the TDX report's place, and adds bytes at the end."""
    for guest, judge in ((GUEST, JUDGE), (TD_GUEST, TD_JUDGE)):
        good = guest.evidence()
        raw = good.parts["hcl_report"]
        covered = range(32, 32 + 1184) if guest is GUEST else range(0)
        unsigned = [at for at in range(32 + 1184 + 20) if at not in covered]
        spellings = [raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :] for at in unsigned]
        spellings += [guest.hcl_report(version=2), guest.hcl_report(pad=1), raw + bytes(100)]
        for other in spellings:
            with pytest.raises(MalformedEvidence):
                judge.verify(replace(good, parts={**good.parts, "hcl_report": other}))


def test_what_a_guest_reads_from_its_tpm_is_sent_in_that_one_spelling() -> None:
    guest = copy.copy(TD_GUEST)
    guest.report = b"TDREPORT".ljust(1184, b"\1")
    sent = canonical_hcl_report(guest.hcl_report(version=2, pad=100))
    assert sent == TD_GOOD.parts["hcl_report"]
    assert parse_hcl_report(guest.hcl_report()).report.startswith(b"TDREPORT")


def test_a_tdx_quote_that_is_not_about_this_key() -> None:
    other = AzureGuest(INTEL)
    TD_JUDGE.refused("evidence.not_bound", td_changed(td_quote=other.td_quote))
    TD_JUDGE.refused("evidence.not_bound", td_changed(td_quote=INTEL.evidence().parts["quote"]))
    TD_JUDGE.refused("evidence.unknown_evidence", td_changed(hcl_report=GUEST.hcl_report()))
    mixed = replace(GOOD, parts={**GOOD.parts, "hcl_report": TD_GUEST.hcl_report()})
    refused("evidence.unknown_evidence", mixed)
    TD_JUDGE.refused("evidence.malformed_evidence", replace(TD_GOOD, chain=AMD.chain))
    debug = AzureGuest(INTEL, attributes=1 << 28 | 1)
    TD_JUDGE.refused("policy.debug_guest", debug.evidence())


def test_real_tdx_evidence_of_azure_is_bound_and_lacks_only_intels_word() -> None:
    folder = vectors("vtpm-tdx")
    fields = json.loads((folder / "evidence-v0.json").read_bytes())
    hcl = parse_hcl_report(bytes(fields["hcl_report"]))
    assert (hcl.kind, hcl.secure_boot) == (HCL_TDX, True)
    padded = bytes(fields["td_quote"])
    quote = padded[: parse_quote(padded).end]
    assert quote[48 + 520 :][:32] == hashlib.sha256(hcl.text).digest()
    message = fields["tpm_quote"]
    signature = bytes.fromhex("0014000b0100") + bytes(message["signature"])
    values = b"".join(map(bytes, message["pcrs"]))
    _, pcrs = verify_quote(bytes(message["message"]), signature, hcl.key, values)
    assert len(pcrs) == 22
    parts = {
        "hcl_report": canonical_hcl_report(bytes(fields["hcl_report"])),
        "td_quote": canonical_quote(quote),
        "quote": bytes(message["message"]),
        "signature": signature,
        "pcrs": values,
    }
    evidence = Evidence("az-tdx-vtpm", CHALLENGE, parts, ())
    with pytest.raises(
        AttestationError,
        match="no Intel collateral for tdx platforms 00806F05",
        check=coded("evidence.stale_revocation_list"),
    ):
        describe_evidence(evidence, Trust(THEN))
