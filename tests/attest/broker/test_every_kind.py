"""Every kind of evidence, made under the tests' own roots, through the whole broker."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.decrepit.ciphers.modes import CFB
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.kdf.concatkdf import ConcatKDFHash
from cryptography.hazmat.primitives.serialization import Encoding

from sealring.attest.broker.keys import open_broker_keys
from sealring.attest.evidence import Challenge, Evidence, Trust, judge
from sealring.attest.evidence.attesters import GuestAttester, TpmAttester
from sealring.attest.evidence.cache import read_policy
from sealring.attest.evidence.tpm import machine as machine_module
from sealring.attest.evidence.tpm.commands import Tpm
from sealring.attest.evidence.tpm.credential import check_ak, kdfa, subject
from sealring.attest.evidence.tpm.machine import TpmMachine
from sealring.attest.evidence.worker import claims_in
from sealring.core.identity.certificates import make_authority
from sealring.errors import AttestationError, BrokerRefusal, PolicyRefusal, SealringError
from tests.attest.broker.local import JOB, Place, running
from tests.attest.evidence import swtpm
from tests.attest.minting import NOW
from tests.attest.minting.amd import MEASUREMENT, Amd
from tests.attest.minting.intel import MRTD, Intel
from tests.attest.minting.nvidia import Nvidia
from tests.attest.minting.tpm import BOOT, AzureGuest, Maker, pcr_values
from tests.codes import coded

AMD, INTEL, GPU, MAKER = Amd(), Intel(), Nvidia(), Maker()
AZURE, AZURE_TDX = AzureGuest(AMD), AzureGuest(INTEL)
PCR4 = pcr_values(BOOT)[4].hex()
SNP = f'''[snp]
measurements = ["{MEASUREMENT.hex()}"]
unchecked = ["minimum_tcb", "platform_info"]
'''
LISTS = "[freshness]\nrequire_revocation_lists = false\n"


@dataclass(frozen=True)
class Minted:
    """An attester whose hardware is a stand-in of the tests."""

    kind: str
    make: Callable[[Challenge], Evidence]

    def introduce(self) -> dict[str, Any]:
        return {}

    def attest(self, nonce: bytes, public_key: bytes, extra: dict[str, Any]) -> Evidence:
        return self.make(Challenge(nonce, public_key))


def snp(challenge: Challenge, **changes: Any) -> Evidence:
    report = AMD.report(challenge=challenge, **changes)
    return Evidence("snp", challenge, {"report": report}, AMD.chain, changes.get("devices", ()))


def snp_with_gpu(challenge: Challenge) -> Evidence:
    return snp(challenge, devices=(GPU.evidence(challenge.device_nonce("snp")),))


class MintedTpm:
    """Opens credentials as a TPM does, with the endorsement key that the maker has certified."""

    kind = "tpm"

    def introduce(self) -> dict[str, Any]:
        chain = [base64.b64encode(one).decode() for one in MAKER.chain]
        return {"chain": chain, "ak": base64.b64encode(MAKER.ak).decode()}

    def attest(self, nonce: bytes, public_key: bytes, extra: dict[str, Any]) -> Evidence:
        secret = self.open(base64.b64decode(extra["credential"]))
        credential = subject(MAKER.ek.der, MAKER.ak) + secret
        return MAKER.evidence(Challenge(nonce, public_key, credential))

    def open(self, blob: bytes) -> bytes:
        identity, rest = taken(blob)
        (_, hidden), (x, y) = taken(identity), taken(taken(rest)[0])
        at_x, at_y = (int.from_bytes(one, "big") for one in (x, taken(y)[0]))
        point = ec.EllipticCurvePublicNumbers(at_x, at_y, ec.SECP256R1()).public_key()
        own = MAKER.ek.key.public_key().public_numbers().x.to_bytes(32, "big")
        shared = MAKER.ek.key.exchange(ec.ECDH(), point)
        seed = ConcatKDFHash(hashes.SHA256(), 32, b"IDENTITY\0" + x + own).derive(shared)
        key = kdfa(seed, b"STORAGE", check_ak(MAKER.ak).name, 16)
        return taken(Cipher(AES(key), CFB(bytes(16))).decryptor().update(hidden))[0]


def taken(data: bytes) -> tuple[bytes, bytes]:
    """The bytes that the first two bytes count, and the rest."""
    size = 2 + int.from_bytes(data[:2], "big")
    return data[2:size], data[size:]


def tpm_by_certificate(challenge: Challenge) -> Evidence:
    chain = (MAKER.ak_certificate.der, *MAKER.chain[1:])
    return replace(MAKER.evidence(challenge), chain=chain)


CASES = {
    "snp": (Minted("snp", snp), AMD.trust(), SNP),
    "tdx": (
        Minted("tdx", lambda challenge: INTEL.evidence(challenge=challenge)),
        INTEL.trust(),
        f'[tdx]\nmeasurements = ["{MRTD.hex()}"]\nunchecked = ["rtmr0", "rtmr1", "rtmr2"]',
    ),
    "azure": (
        Minted("az-snp-vtpm", lambda challenge: AZURE.evidence(challenge)),
        AMD.trust(),
        f'[az-snp-vtpm]\nmeasurements = ["{MEASUREMENT.hex()}"]\npcrs = {{4 = ["{PCR4}"]}}\n'
        'unchecked = ["minimum_tcb", "platform_info", "pcr7", "ima"]',
    ),
    "azure tdx": (
        Minted("az-tdx-vtpm", lambda challenge: AZURE_TDX.evidence(challenge)),
        INTEL.trust(),
        f'[az-tdx-vtpm]\nmeasurements = ["{MRTD.hex()}"]\npcrs = {{4 = ["{PCR4}"]}}\n'
        'unchecked = ["pcr7", "ima"]',
    ),
    "gpu": (
        Minted("snp", snp_with_gpu),
        replace(AMD.trust(), nvidia=GPU.trust().nvidia, references=GPU.references()),
        f"{SNP}\n[nvidia]\ngpus = 1",
    ),
    "tpm with an AK certificate": (
        Minted("tpm", tpm_by_certificate),
        MAKER.trust(),
        f'[tpm]\nroots = ["{MAKER.root.fingerprint}"]\npcrs = {{4 = ["{PCR4}"]}}\n'
        'ak_certificates = true\nunchecked = ["pcr0", "pcr7", "ima"]',
    ),
    "tpm": (
        MintedTpm(),
        MAKER.trust(),
        f'[tpm]\nroots = ["{MAKER.root.fingerprint}"]\npcrs = {{4 = ["{PCR4}"]}}\n'
        'unchecked = ["pcr0", "pcr7", "ima"]',
    ),
}


def at(directory: Path, case: tuple[Any, Trust, str]) -> Place:
    place = Place(directory, trust=lambda: case[1], clock=NOW.timestamp)
    # The evidence is of another year than the test, so the authority must cover that year.
    authority = make_authority(
        place.keys.authority_key, "then", 1, NOW - timedelta(days=1), NOW + timedelta(days=3650)
    )
    place.authority.write_bytes(authority.public_bytes(Encoding.PEM))
    place.keys = open_broker_keys(place.ca)
    place.attester = case[0]
    place.policy.write_text(f"version = 1\nrejoins = 5\n{LISTS}\n{case[2]}\n")
    return place


@pytest.mark.parametrize("name", CASES)
def test_each_kind_joins_and_its_certificate_passes_the_policy_again(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    place = at(tmp_path, case)
    with running(place) as broker:
        joined = broker.join(0)
    claimed = claims_in(joined.certificate)
    assert claimed is not None
    assert (claimed.kind, claimed.simulated) == (case[0].kind, False)  # type: ignore[attr-defined]
    # Judged as by a peer, which has only the claim.
    assert judge(read_policy(place.policy)[0], claimed, 0, JOB).admitted
    if name == "gpu":
        assert [device.model for device in claimed.devices] == ["GH100"]


def test_a_debug_guest_another_image_and_a_replay(tmp_path: Path) -> None:
    place = at(tmp_path, (CASES["snp"][0], CASES["gpu"][1], CASES["snp"][2]))
    with running(place) as broker:
        for error, make in (
            ("policy.debug_guest", lambda challenge: snp(challenge, policy=0x30000 | 1 << 19)),
            (
                "policy.measurement_not_allowed",
                lambda challenge: snp(challenge, measurement=bytes(48)),
            ),
            ("evidence.not_bound", lambda challenge: snp(replace(challenge, nonce=bytes(32)))),
            ("policy.device_not_allowed", snp_with_gpu),
        ):
            place.attester = Minted("snp", make)
            with pytest.raises(SealringError, check=coded(error)):
                broker.join(0)


@pytest.mark.threat("B18")
def test_a_revoked_machine_cannot_come_again_with_another_key_or_rank(tmp_path: Path) -> None:
    place = at(tmp_path, CASES["snp"])
    with running(place) as broker:
        broker.join(0)
        broker.revoke(0)
        for rank in (0, 1):
            with pytest.raises(
                BrokerRefusal, match="machine", check=coded("broker.worker_revoked")
            ):
                broker.join(rank)


def test_a_tpm_that_cannot_open_its_credential(tmp_path: Path) -> None:
    place = at(tmp_path, CASES["tpm"])

    class Guessing(MintedTpm):
        def open(self, blob: bytes) -> bytes:
            return bytes(32)

    place.attester = Guessing()
    with (
        running(place) as broker,
        pytest.raises(AttestationError, check=coded("evidence.not_bound")),
    ):
        broker.join(0)


@swtpm.needs_swtpm
def test_a_real_tpm_in_software_joins(tmp_path: Path) -> None:
    with swtpm.running() as address, Tpm.open(address) as tpm:
        with tpm.primary(machine_module.EK_P256) as (_, public):
            x, y = (int.from_bytes(part, "big") for part in (public[-66:-34], public[-32:]))
        key = ec.EllipticCurvePublicNumbers(x, y, ec.SECP256R1()).public_key()
        maker = Maker(ek=key)
        swtpm.extend(tpm, 4, b"\x04" * 32)
        machine = TpmMachine(tpm, maker.chain[1:], certificate=maker.ek.der)
        shown = tpm.read_pcrs([4]).hex()
        policy = f'[tpm]\nroots = ["{maker.root.fingerprint}"]\npcrs = {{4 = ["{shown}"]}}\n'
        policy += 'unchecked = ["pcr0", "pcr7", "ima"]'
        place = at(tmp_path, (TpmAttester(machine), maker.trust(), policy))
        with running(place) as broker:
            own = Ed25519PrivateKey.generate()
            first = broker.join(0, key=own)
            assert first.certificate.public_key() == own.public_key()
            broker.join(0, key=own)
            # Another worker of the same machine.
            claims = [claims_in(one.certificate) for one in (broker.join(1), first)]
            assert claims[0] is not None
            assert claims[1] is not None
            assert claims[0].machine == claims[1].machine
            swtpm.extend(tpm, 4, b"\x05" * 32)
            with pytest.raises(
                PolicyRefusal, match="pcr4", check=coded("policy.measurement_not_allowed")
            ):
                broker.join(0, key=own)


def test_gpus_are_asked_only_where_the_policy_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Guest:
        kind = "snp"

        def attest(self, nonce: bytes, public_key: bytes, devices: Any = ()) -> Any:
            return nonce, devices

    asked: list[bytes] = []
    monkeypatch.setattr(
        "sealring.attest.evidence.attesters.collect_gpus",
        lambda nonce: asked.append(nonce) or ("gpu",),
    )
    assert GuestAttester(Guest(), gpus=False).attest(bytes(32), b"k", {}) == (bytes(32), ())  # type: ignore[comparison-overlap]
    assert asked == []
    assert GuestAttester(Guest(), gpus=True).attest(bytes(32), b"k", {})[1] == ("gpu",)  # type: ignore[index]
    assert asked == [Challenge(bytes(32), b"k").device_nonce("snp")]
