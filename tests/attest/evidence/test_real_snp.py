"""Reports of real processors with their real chains, if they lie beside the checkout."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from sealring.attest.evidence import Trust
from sealring.attest.evidence.snp import Report, verify_report
from sealring.errors import (
    AttestationError,
    ForgedEvidence,
    MalformedEvidence,
    UntrustedChain,
)
from tests.codes import coded

VECTORS = Path(__file__).parents[4] / "shared" / "vectors" / "snp"
THEN = datetime(2024, 1, 1, tzinfo=UTC)
CASES = [
    ("attestation.bin", "vcek.testcer", "milan.testcer", True),
    ("report_milan.hex", "vcek_milan.der", "cert_chain_milan", False),
    ("snp_test-report.bin", "snp_test-vcek.der", "milan3.pem", False),
]


def read(report: str, leaf: str, chain: str) -> tuple[bytes, tuple[bytes, ...]]:
    if not VECTORS.exists():
        pytest.skip(f"AMD's evidence is not beside this checkout ({VECTORS})")
    raw = (VECTORS / report).read_bytes()
    if report.endswith(".hex"):
        raw = bytes.fromhex(raw.decode())
    issuers = x509.load_pem_x509_certificates((VECTORS / chain).read_bytes())[:2]
    ders = (one.public_bytes(Encoding.DER) for one in issuers)
    return raw, ((VECTORS / leaf).read_bytes(), *ders)


def check(raw: bytes, chain: tuple[bytes, ...], now: datetime = THEN) -> Report:
    return verify_report(raw, chain, Trust(now))[0]


@pytest.mark.parametrize(("report", "leaf", "chain", "debug"), CASES)
def test_real_reports_verify_under_the_pinned_root(
    report: str, leaf: str, chain: str, debug: bool
) -> None:
    assert check(*read(report, leaf, chain)).debug is debug


@pytest.mark.parametrize(("report", "leaf", "chain", "debug"), CASES)
@pytest.mark.threat("E1")
def test_their_broken_variants_do_not(report: str, leaf: str, chain: str, debug: bool) -> None:
    raw, certificates = read(report, leaf, chain)
    for at in (0, 8, 0x30, 0x34, 0x48, 0x50, 0x90, 0x180, 0x1A0, 0x29F, 0x2A0, 0x2E8, 1183):
        with pytest.raises((ForgedEvidence, MalformedEvidence)):
            check(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :], certificates)
    for other in (raw[:-1], raw + b"\0"):
        with pytest.raises(MalformedEvidence):
            check(other, certificates)
    with pytest.raises(UntrustedChain, check=coded("evidence.chain_expired")):
        check(raw, certificates, datetime(2035, 1, 1, tzinfo=UTC))
    for at in range(0, len(certificates[0]), 31):
        leaf_der = bytearray(certificates[0])
        leaf_der[at] ^= 1
        with pytest.raises(AttestationError):
            check(raw, (bytes(leaf_der), *certificates[1:]))


@pytest.mark.threat("E15")
def test_one_machines_report_under_anothers_key() -> None:
    raw, _ = read(*CASES[1][:3])
    _, chain = read(*CASES[2][:3])
    with pytest.raises(ForgedEvidence):
        check(raw, chain)
