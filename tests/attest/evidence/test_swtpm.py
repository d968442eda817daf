"""A software TPM makes evidence: credentials are activated, PCRs extended and quoted."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA256

from sealring.attest.evidence import (
    Challenge,
    Trust,
    judge,
    parse_evidence,
    parse_policy,
    verify_evidence,
)
from sealring.attest.evidence.chains import load_certificate
from sealring.attest.evidence.tpm import machine as machine_module
from sealring.attest.evidence.tpm.commands import PASSWORD, Tpm
from sealring.attest.evidence.tpm.machine import CertifiedTpmMachine, Logs, TpmMachine, read_issuers
from sealring.attest.evidence.tpm.structures import parse_public
from sealring.errors import AttestationError, ForgedEvidence, MalformedEvidence, TpmFailed
from tests.attest.evidence.swtpm import extend, needs_swtpm, reset, running, store
from tests.attest.minting import CHALLENGE
from tests.attest.minting.nvidia import Nvidia
from tests.attest.minting.tpm import BOOT, Credential, Maker, event_log, make_credential
from tests.codes import coded

pytestmark = needs_swtpm
P256_INDEX, RSA_INDEX = 0x01C0000A, 0x01C00002


@pytest.fixture(scope="module")
def tpm() -> Iterator[Tpm]:
    with running() as address, Tpm.open(address) as opened:
        yield opened


@pytest.fixture(scope="module")
def maker(tpm: Tpm) -> Maker:
    """Certifies this TPM's EK, and stores the certificate where makers store it."""
    with tpm.primary(machine_module.EK_P256) as (_, public):
        x, y = (int.from_bytes(part, "big") for part in (public[-66:-34], public[-32:]))
    key = ec.EllipticCurvePublicNumbers(x, y, ec.SECP256R1()).public_key()
    made = Maker(ek=key)
    # Some makers fill the index up after the certificate.
    store(tpm, P256_INDEX, made.ek.der + bytes(40))
    return made


@pytest.fixture(scope="module")
def machine(tpm: Tpm, maker: Maker, tmp_path_factory: pytest.TempPathFactory) -> TpmMachine:
    for event in BOOT:
        if event.kind != 3:
            extend(tpm, event.pcr, event.digest)
    log = tmp_path_factory.mktemp("log") / "binary_bios_measurements"
    log.write_bytes(event_log(BOOT[1:]))
    return TpmMachine(tpm, maker.chain[1:], logs=Logs(log))


def asked(machine: TpmMachine, trust: Trust) -> tuple[Credential, Challenge]:
    shown = machine.introduction()
    credential = make_credential(shown.chain, shown.ak, trust)
    return credential, Challenge(CHALLENGE.nonce, CHALLENGE.public_key, credential.expected)


def test_a_tpm_worker_from_introduction_to_proof(machine: TpmMachine, maker: Maker) -> None:
    credential, challenge = asked(machine, maker.trust())
    evidence = machine.attest(challenge.nonce, challenge.public_key, credential.blob)
    worker = verify_evidence(parse_evidence(evidence.encode()), challenge, maker.trust())
    assert worker.events["pcr4"] == (BOOT[2].digest.hex(), BOOT[3].digest.hex())
    assert worker.registers["pcr7"] != "00" * 32
    again = verify_evidence(parse_evidence(evidence.encode()), challenge, maker.trust())
    assert again.machine == worker.machine


def test_a_tpm_worker_with_a_gpu(machine: TpmMachine, maker: Maker) -> None:
    gpu = Nvidia()
    credential, challenge = asked(machine, maker.trust())
    devices = (gpu.evidence(CHALLENGE.device_nonce("tpm")),)
    evidence = machine.attest(challenge.nonce, challenge.public_key, credential.blob, devices)
    trust = replace(maker.trust(), nvidia=gpu.trust().nvidia)
    worker = verify_evidence(parse_evidence(evidence.encode()), challenge, trust)
    assert [device.model for device in worker.devices] == ["GH100"]
    for others in ((), (*devices, *devices)):
        with pytest.raises(AttestationError, check=coded("evidence.not_bound")):
            verify_evidence(replace(evidence, devices=others), challenge, trust)


@pytest.mark.threat("E2")
def test_an_old_quote_does_not_answer_a_new_credential(machine: TpmMachine, maker: Maker) -> None:
    credential, challenge = asked(machine, maker.trust())
    evidence = machine.attest(challenge.nonce, challenge.public_key, credential.blob)
    _, fresh = asked(machine, maker.trust())
    with pytest.raises(AttestationError, check=coded("evidence.not_bound")):
        verify_evidence(evidence, fresh, maker.trust())


@pytest.mark.threat("E2")
def test_a_credential_for_another_key_or_changed_on_the_way_does_not_open(
    machine: TpmMachine, maker: Maker
) -> None:
    stranger = Maker()
    credential = make_credential(maker.chain, stranger.ak, maker.trust())
    with pytest.raises(TpmFailed, match="ActivateCredential"):
        machine.attest(bytes(32), b"key", credential.blob)
    credential, _ = asked(machine, maker.trust())
    for at in (5, 40, len(credential.blob) - 3):
        bent = bytearray(credential.blob)
        bent[at] ^= 1
        with pytest.raises(TpmFailed):
            machine.attest(bytes(32), b"key", bytes(bent))


def test_a_pcr_extended_after_boot_is_left_out_of_the_log(
    tpm: Tpm, machine: TpmMachine, maker: Maker
) -> None:
    extend(tpm, 7, b"\x11" * 32)
    credential, challenge = asked(machine, maker.trust())
    evidence = machine.attest(challenge.nonce, challenge.public_key, credential.blob)
    worker = verify_evidence(evidence, challenge, maker.trust())
    assert set(worker.events) == {"pcr0", "pcr4"}


@pytest.mark.threat("E3")
def test_pcr_16_can_be_reset_and_is_not_even_quoted(
    tpm: Tpm, machine: TpmMachine, maker: Maker
) -> None:
    extend(tpm, 16, b"\x11" * 32)
    before = tpm.read_pcrs([16])
    reset(tpm, 16)
    assert tpm.read_pcrs([16]) != before
    credential, challenge = asked(machine, maker.trust())
    evidence = machine.attest(challenge.nonce, challenge.public_key, credential.blob)
    assert "pcr16" not in verify_evidence(evidence, challenge, maker.trust()).registers


def test_every_byte_of_a_real_quote_counts(machine: TpmMachine, maker: Maker) -> None:
    credential, challenge = asked(machine, maker.trust())
    evidence = machine.attest(challenge.nonce, challenge.public_key, credential.blob)
    quote = evidence.parts["quote"]
    for at in range(0, len(quote), 3):
        bent = quote[:at] + bytes([quote[at] ^ 1]) + quote[at + 1 :]
        forged = replace(evidence, parts={**evidence.parts, "quote": bent})
        with pytest.raises(ForgedEvidence):
            verify_evidence(forged, challenge, maker.trust())


def test_a_tpm_without_a_certificate_says_so() -> None:
    with (
        running() as address,
        Tpm.open(address) as bare,
        pytest.raises(TpmFailed, match="no certificate"),
    ):
        TpmMachine(bare, ())


def test_an_address_where_no_tpm_is(tmp_path: Path) -> None:
    for address in (
        str(tmp_path / "tpm"),
        f"unix://{tmp_path}/tpm",
        "tcp://127.0.0.1:1",
        "tcp://x",
    ):
        with pytest.raises(TpmFailed, match="cannot be opened"):
            Tpm.open(address)


def test_a_tpm_whose_attestation_key_has_a_certificate() -> None:
    with running() as address, Tpm.open(address) as tpm:
        with pytest.raises(TpmFailed, match="no certificate for an attestation key"):
            CertifiedTpmMachine(tpm, ())
        with tpm.primary(machine_module.AK_TEMPLATE) as (_, ak):
            key = parse_public(ak).key
        maker = Maker(ak_certified=key)
        store(tpm, 0x01C10002, maker.ak_certificate.der + bytes(9))
        store(tpm, 0x01C10003, machine_module.AK_TEMPLATE)
        machine = CertifiedTpmMachine(tpm, maker.chain[1:])
        evidence = machine.attest(CHALLENGE.nonce, CHALLENGE.public_key)
        worker = verify_evidence(parse_evidence(evidence.encode()), CHALLENGE, maker.trust())
        assert worker.guest["ak_certificate"] == 1
        with pytest.raises(AttestationError, check=coded("evidence.not_bound")):
            verify_evidence(evidence, replace(CHALLENGE, nonce=bytes(32)), maker.trust())


def test_a_tpm_that_keeps_only_sha_384(tmp_path: Path) -> None:
    banks = b"".join(bank.to_bytes(2, "big") + b"\3" + bits for bank, bits in (
        (4, bytes(3)), (11, bytes(3)), (12, b"\xff" * 3), (13, bytes(3)),
    ))  # fmt: skip
    with running(tmp_path) as address, Tpm.open(address) as tpm:
        platform = 0x4000000C
        tpm.call("PCR_Allocate", 0x12B, (platform,), (PASSWORD,), (4).to_bytes(4, "big") + banks)
        tpm.call("Shutdown", 0x145, parameters=bytes(2))
    log = tmp_path / "binary_bios_measurements"
    log.write_bytes(event_log(BOOT[1:], ((12, 48),)))
    with running(tmp_path) as address, Tpm.open(address) as tpm:
        for event in BOOT[1:]:
            digest = hashlib.sha384(event.content).digest()
            values = (1).to_bytes(4, "big") + (12).to_bytes(2, "big") + digest
            tpm.call("PCR_Extend", 0x182, (event.pcr,), (PASSWORD,), values)
        with tpm.primary(machine_module.EK_P256) as (_, public):
            x, y = (int.from_bytes(part, "big") for part in (public[-66:-34], public[-32:]))
        key = ec.EllipticCurvePublicNumbers(x, y, ec.SECP256R1()).public_key()
        maker = Maker(ek=key)
        machine = TpmMachine(tpm, maker.chain[1:], maker.ek.der, Logs(log))
        credential, challenge = asked(machine, maker.trust())
        evidence = machine.attest(challenge.nonce, challenge.public_key, credential.blob)
    worker = verify_evidence(parse_evidence(evidence.encode()), challenge, maker.trust())
    assert worker.registers["pcr17"] == "ff" * 48
    boot = (hashlib.sha384(BOOT[n].content).hexdigest() for n in (2, 3))
    assert worker.events["pcr4"] == tuple(boot)
    policy = f"""version = 1
[tpm]
roots = ["{maker.root.fingerprint}"]
pcrs = {{4 = ["{worker.registers["pcr4"]}"]}}
unchecked = ["pcr0", "pcr7", "ima"]
"""
    rules = judge(parse_policy(policy), worker, None).rules
    assert [rule.name for rule in rules if rule.refusal] == ["revocation"]
    short = {**evidence.parts, "pcrs": evidence.parts["pcrs"][:-16]}
    with pytest.raises(MalformedEvidence, match="of 48 bytes"):
        verify_evidence(replace(evidence, parts=short), challenge, maker.trust())


@pytest.mark.parametrize("kind", ["secp384r1", "rsa3072"])
def test_a_tpm_with_a_larger_endorsement_key(kind: str) -> None:
    index, template = {
        "secp384r1": (0x01C00016, machine_module.EK_P384),
        "rsa3072": (0x01C0001C, machine_module.EK_RSA_3072),
    }[kind]
    with running() as address, Tpm.open(address) as tpm:
        with tpm.primary(template) as (_, public):
            numbers = rsa.RSAPublicNumbers(65537, int.from_bytes(public[-384:], "big"))
            if kind == "rsa3072":
                key: object = numbers.public_key()
            else:
                x, y = (int.from_bytes(one, "big") for one in (public[-98:-50], public[-48:]))
                key = ec.EllipticCurvePublicNumbers(x, y, ec.SECP384R1()).public_key()
        maker = Maker(ek=key)
        store(tpm, index, maker.ek.der)
        machine = TpmMachine(tpm, maker.chain[1:])
        credential, challenge = asked(machine, maker.trust())
        evidence = machine.attest(challenge.nonce, challenge.public_key, credential.blob)
        worker = verify_evidence(parse_evidence(evidence.encode()), challenge, maker.trust())
        assert worker.registers["pcr17"] == "ff" * 32
        bent = bytearray(credential.blob)
        bent[20] ^= 1
        with pytest.raises(TpmFailed, match="ActivateCredential"):
            machine.attest(challenge.nonce, challenge.public_key, bytes(bent))


@pytest.mark.skipif(shutil.which("swtpm_setup") is None, reason="swtpm-tools is not installed")
def test_a_tpm_that_its_own_maker_certified(tmp_path: Path) -> None:
    """swtpm's own maker: an RSA EK, its certificate in the TPM, and a CA of two levels."""
    (tmp_path / "ca").mkdir()
    (tmp_path / "localca.conf").write_text(
        f"statedir = {tmp_path}/ca\nsigningkey = {tmp_path}/ca/signkey.pem\n"
        f"issuercert = {tmp_path}/ca/issuercert.pem\ncertserial = {tmp_path}/ca/certserial\n"
    )
    (tmp_path / "options").write_text(
        "--platform-manufacturer x\n--platform-version 1\n--platform-model y\n"
    )
    (tmp_path / "setup.conf").write_text(
        f"create_certs_tool = swtpm_localca\ncreate_certs_tool_config = {tmp_path}/localca.conf\n"
        f"create_certs_tool_options = {tmp_path}/options\n"
    )
    done = subprocess.run(
        ["swtpm_setup", "--tpm2", "--tpmstate", str(tmp_path), "--create-ek-cert",
         "--config", str(tmp_path / "setup.conf"), "--overwrite"],
        capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"swtpm_setup cannot certify here: {(done.stdout + done.stderr)[-300:]}")
    pems = (tmp_path / "ca" / "issuercert.pem", tmp_path / "ca" / "swtpm-localca-rootca-cert.pem")
    issuers = read_issuers(b"".join(one.read_bytes() for one in pems))
    with running(tmp_path) as address, Tpm.open(address) as tpm:
        machine = TpmMachine(tpm, issuers)
        certificate = load_certificate(machine.introduction().chain[0])
        assert isinstance(certificate.public_key(), rsa.RSAPublicKey)
        root = load_certificate(issuers[-1])
        pinned = frozenset({root.fingerprint(SHA256()).hex()})
        trust = Trust(certificate.not_valid_before_utc, tpm=pinned)
        credential, challenge = asked(machine, trust)
        evidence = machine.attest(challenge.nonce, challenge.public_key, credential.blob)
        assert verify_evidence(evidence, challenge, trust).label == "tpm 2.0"
