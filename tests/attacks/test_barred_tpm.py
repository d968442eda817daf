"""A barred machine tries to join again with a respelled certificate or with its other key."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)

from sealring.attest.evidence.attesters import TpmAttester
from sealring.attest.evidence.tpm import machine as machine_module
from sealring.attest.evidence.tpm.commands import Tpm
from sealring.attest.evidence.tpm.machine import TpmMachine
from sealring.attest.evidence.worker import claims_in
from sealring.errors import AttestationError, BrokerRefusal
from tests.attest.broker.local import Place, Running, running
from tests.attest.broker.test_every_kind import at
from tests.attest.evidence import swtpm
from tests.attest.minting import issue
from tests.attest.minting.tpm import EK_PURPOSE, Maker
from tests.codes import coded

pytestmark = swtpm.needs_swtpm
P256_INDEX, RSA_INDEX = 0x01C0000A, 0x01C00002
P384_ORDER = int(
    "ffffffffffffffffffffffffffffffffffffffffffffffffc7634d81f4372ddf581a0db248b0a77aecec196accc52973",
    16,
)


@dataclass
class Chip:
    """A TPM in software, whose maker has certified both of its endorsement keys."""

    tpm: Tpm
    maker: Maker
    p256: bytes
    rsa: bytes

    def machine(self, certificate: bytes | None = None) -> TpmMachine:
        return TpmMachine(self.tpm, self.maker.chain[1:], certificate=certificate)

    def place(self, directory: Path) -> Place:
        shown = self.tpm.read_pcrs([4]).hex()
        policy = f'[tpm]\nroots = ["{self.maker.root.fingerprint}"]\npcrs = {{4 = ["{shown}"]}}\n'
        policy += 'unchecked = ["pcr0", "pcr7", "ima"]'
        return at(directory, (TpmAttester(self.machine()), self.maker.trust(), policy))


@pytest.fixture(scope="module")
def chip() -> Iterator[Chip]:
    with swtpm.running() as address, Tpm.open(address) as tpm:
        with tpm.primary(machine_module.EK_P256) as (_, public):
            x, y = (int.from_bytes(part, "big") for part in (public[-66:-34], public[-32:]))
        maker = Maker(ek=ec.EllipticCurvePublicNumbers(x, y, ec.SECP256R1()).public_key())
        with tpm.primary(machine_module.EK_RSA) as (_, public):
            modulus = int.from_bytes(public[-256:], "big")
        other = issue(
            "endorsement key", maker.signer, ca=False, days=100, usage=["key_encipherment"],
            public_key=rsa.RSAPublicNumbers(65537, modulus).public_key(), extensions=[EK_PURPOSE],
        )  # fmt: skip
        swtpm.store(tpm, P256_INDEX, maker.ek.der)
        swtpm.store(tpm, RSA_INDEX, other.der)
        yield Chip(tpm, maker, maker.ek.der, other.der)


def bar(broker: Running, machine: str) -> None:
    broker.decide(lambda ledger, view: ledger.bar_machine(view, time.time(), machine))


def joined_machine(broker: Running, rank: int) -> str:
    claimed = claims_in(broker.join(rank).certificate)
    assert claimed is not None
    return claimed.machine


def other_spelling(certificate: bytes) -> bytes:
    """Returns the certificate with its ECDSA signature (r, s) as (r, n - s), which verifies too."""
    parsed = x509.load_der_x509_certificate(certificate)
    r, s = decode_dss_signature(parsed.signature)
    body = parsed.tbs_certificate_bytes
    start = certificate.index(body) + len(body)
    algorithm = certificate[start : start + 2 + certificate[start + 1]]
    signature = b"\0" + encode_dss_signature(r, P384_ORDER - s)
    content = body + algorithm + b"\x03" + bytes([len(signature)]) + signature
    return b"\x30\x82" + len(content).to_bytes(2, "big") + content


@pytest.mark.threat("B22")
def test_a_barred_tpm_under_another_spelling_of_its_certificate(chip: Chip, tmp_path: Path) -> None:
    spelled = other_spelling(chip.p256)
    parsed = x509.load_der_x509_certificate(spelled)
    parsed.verify_directly_issued_by(chip.maker.signer.certificate)
    assert spelled != chip.p256
    place = chip.place(tmp_path)
    place.attester = TpmAttester(chip.machine(chip.p256))
    with running(place) as broker:
        bar(broker, joined_machine(broker, 0))
        place.attester = TpmAttester(chip.machine(spelled))
        with pytest.raises(BrokerRefusal, match="machine", check=coded("broker.worker_revoked")):
            broker.join(1)


@pytest.mark.parametrize("by", ["rank", "machine"])
@pytest.mark.threat("B22")
def test_a_barred_tpm_with_its_other_endorsement_key(by: str, chip: Chip, tmp_path: Path) -> None:
    place = chip.place(tmp_path)
    with running(place) as broker:
        machine = joined_machine(broker, 0)
        if by == "rank":
            broker.revoke(0)
        else:
            bar(broker, machine)
        for certificate in (chip.rsa, chip.p256, None):
            place.attester = TpmAttester(chip.machine(certificate))
            with pytest.raises(
                BrokerRefusal, match="machine", check=coded("broker.worker_revoked")
            ):
                broker.join(1)


@pytest.mark.threat("B22")
def test_a_key_that_is_learned_later_is_barred_then(chip: Chip, tmp_path: Path) -> None:
    place = chip.place(tmp_path)
    place.attester = TpmAttester(chip.machine(chip.p256))
    with running(place) as broker:
        bar(broker, joined_machine(broker, 0))
        # The machine shows only its second key. No broker has linked that key to the first yet.
        place.attester = TpmAttester(chip.machine(chip.rsa))
        broker.join(1)
        # Now the machine shows both keys: from here on both are barred.
        place.attester = TpmAttester(chip.machine())
        with pytest.raises(BrokerRefusal, match="machine", check=coded("broker.worker_revoked")):
            broker.join(2)
        place.attester = TpmAttester(chip.machine(chip.rsa))
        with pytest.raises(BrokerRefusal, match="machine", check=coded("broker.worker_revoked")):
            broker.join(3)


@pytest.mark.threat("B23")
def test_another_tpms_key_cannot_be_claimed(chip: Chip, tmp_path: Path) -> None:
    """A machine that expects to be barred claims a victim's key, so that both would be barred."""
    victim = Maker().ek.der
    place = chip.place(tmp_path)

    class Claiming(TpmAttester):
        def attest(self, nonce: bytes, public_key: bytes, extra: dict[str, object]):  # type: ignore[no-untyped-def]
            evidence = super().attest(nonce, public_key, extra)
            evidence.parts["endorsements"] += victim  # type: ignore[index]
            return evidence

    place.attester = Claiming(chip.machine())
    with (
        running(place) as broker,
        pytest.raises(AttestationError, check=coded("evidence.not_bound")),
    ):
        broker.join(0)
