"""If (r, s) is an ECDSA signature, so is (r, n - s). Evidence is accepted with only one of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)

from sealring.attest.evidence import Challenge, Evidence, Trust, snp, verify_evidence
from sealring.attest.evidence.az_vtpm import canonical_hcl_report
from sealring.attest.evidence.intel import canonical_quote
from sealring.attest.evidence.nvidia import canonical_report
from sealring.attest.evidence.tpm.structures import canonical_signature
from sealring.errors import MalformedEvidence
from tests.attest.minting import CHALLENGE
from tests.attest.minting.amd import Amd
from tests.attest.minting.intel import Intel
from tests.attest.minting.nvidia import Nvidia
from tests.attest.minting.tpm import AzureGuest, Maker

P256 = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
P384 = 2**384 - 0x389CB27E0BC8D220A7E5F24DB74F58851313E695333AD68D
AMD, INTEL, MAKER, GPU = Amd(), Intel(), Maker(), Nvidia()
QUOTE_SIGNATURE = 48 + 584 + 4
QUOTING_ENCLAVE = QUOTE_SIGNATURE + 128 + 6 + 384

Case = tuple[Evidence, Challenge, Trust, str, int, int, int, Literal["big", "little"]]


def respelled(
    raw: bytes, at: int, size: int, order: int, byteorder: Literal["big", "little"]
) -> bytes:
    at %= len(raw)
    s = int.from_bytes(raw[at : at + size], byteorder)
    assert 0 < s < order
    return raw[:at] + (order - s).to_bytes(size, byteorder) + raw[at + size :]


def cases() -> dict[str, Case]:
    azure, tdx = AzureGuest(AMD).evidence(), INTEL.evidence()
    intel, amd = INTEL.trust(), AMD.trust()
    return {
        "snp": (AMD.evidence(), CHALLENGE, amd, "report", 0x2A0 + 72, 72, P384, "little"),
        "azure": (azure, CHALLENGE, amd, "hcl_report", 32 + 0x2A0 + 72, 72, P384, "little"),
        "tdx": (tdx, CHALLENGE, intel, "quote", QUOTE_SIGNATURE + 32, 32, P256, "big"),
        "enclave": (tdx, CHALLENGE, intel, "quote", QUOTING_ENCLAVE + 32, 32, P256, "big"),
        "tpm": (
            MAKER.evidence(), MAKER.challenge(), MAKER.trust(), "signature", -32, 32, P256, "big",
        ),
    }  # fmt: skip


CANONICAL: dict[str, Callable[[bytes], bytes]] = {
    "report": snp.canonical_report,
    "hcl_report": canonical_hcl_report,
    "quote": canonical_quote,
    "signature": lambda raw: canonical_signature(raw, MAKER.ak_key.public_key()),
}


@pytest.mark.parametrize("name", list(cases()))
@pytest.mark.threat("E1")
def test_a_signature_that_somebody_respelled(name: str) -> None:
    evidence, challenge, trust, part, *place = cases()[name]
    raw = evidence.parts[part]
    verify_evidence(evidence, challenge, trust)
    other = respelled(raw, *place)  # type: ignore[arg-type]
    with pytest.raises(MalformedEvidence, match="not in its one spelling"):
        verify_evidence(replace(evidence, parts={**evidence.parts, part: other}), challenge, trust)
    # A worker whose hardware gives the other spelling converts it before it sends it.
    assert CANONICAL[part](other) == raw


@pytest.mark.threat("E1")
def test_a_devices_signature_that_somebody_respelled() -> None:
    nonce = CHALLENGE.device_nonce("snp")
    device = GPU.evidence(nonce)
    trust = replace(AMD.trust(), nvidia=frozenset({GPU.root.fingerprint}))
    verify_evidence(AMD.evidence(devices=(device,)), CHALLENGE, trust)
    raw = device.parts["report"]
    other = respelled(raw, -48, 48, P384, "big")
    bent = replace(device, parts={"report": other})
    with pytest.raises(MalformedEvidence, match="not in its one spelling"):
        verify_evidence(AMD.evidence(devices=(bent,)), CHALLENGE, trust)
    assert canonical_report(other) == raw


def test_a_number_of_a_tpms_signature_without_its_zeros() -> None:
    key = MAKER.ak_key.public_key()
    full = bytes.fromhex("0018000b0020") + bytes(31) + b"\5" + b"\0\x20" + bytes(30) + b"\1\2"
    short = bytes.fromhex("0018000b000105") + b"\0\2\1\2"
    assert canonical_signature(short, key) == canonical_signature(full, key) == full


def test_a_tpm_is_known_by_its_key_however_its_certificate_is_spelled() -> None:
    """The certificate with its ECDSA signature respelled still names the same TPM."""
    der = MAKER.ek.der
    r, s = decode_dss_signature(MAKER.ek.certificate.signature)
    other_signature = encode_dss_signature(r, P384 - s)
    tbs = MAKER.ek.certificate.tbs_certificate_bytes
    algorithm = bytes.fromhex("300a06082a8648ce3d040303")
    bits = b"\x03" + bytes([len(other_signature) + 1]) + b"\0" + other_signature
    body = tbs + algorithm + bits
    other = b"\x30\x82" + len(body).to_bytes(2, "big") + body
    assert other != der
    maker = copy.copy(MAKER)
    maker.ek = replace(MAKER.ek, certificate=x509.load_der_x509_certificate(other))
    one = verify_evidence(MAKER.evidence(), MAKER.challenge(), MAKER.trust())
    two = verify_evidence(maker.evidence(), maker.challenge(), maker.trust())
    assert one.machine == two.machine


@pytest.mark.parametrize("kind", ["tdx", "sgx"])
@pytest.mark.threat("E1")
def test_a_quote_whose_certificates_somebody_ended_with_a_zero(kind: str) -> None:
    evidence, trust = INTEL.evidence(kind), INTEL.trust(INTEL.collateral(kind))
    raw = evidence.parts["quote"]
    verify_evidence(evidence, CHALLENGE, trust)
    signature = 48 + (584 if kind == "tdx" else 384)
    outer = [signature, *([signature + 4 + 128 + 2] if kind == "tdx" else [])]
    longer = raw + b"\0"
    for at in (*outer, raw.index(b"-----BEGIN") - 4):
        size = int.from_bytes(longer[at : at + 4], "little") + 1
        longer = longer[:at] + size.to_bytes(4, "little") + longer[at + 4 :]
    with pytest.raises(MalformedEvidence, match="not in its one spelling"):
        verify_evidence(replace(evidence, parts={"quote": longer}), CHALLENGE, trust)
    # Some quoting enclaves write this zero; a worker removes it before it sends the quote.
    assert canonical_quote(longer) == raw
