"""GPUs and switches: reports and references made by the tests, and NVIDIA's at their dates."""

from __future__ import annotations

import base64
import json
import sys
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from sealring.attest.evidence import (
    AttestedWorker,
    Challenge,
    Trust,
    describe_evidence,
    parse_evidence,
    verify_evidence,
)
from sealring.attest.evidence.evidence import DeviceEvidence
from sealring.attest.evidence.nvidia import canonical_report, verify_nvidia, verify_report
from sealring.attest.evidence.nvidia_reference import Reference, verify_reference
from sealring.attest.evidence.worker import AttestedDevice
from sealring.errors import (
    AttestationError,
    ConfigurationError,
    ForgedEvidence,
    MalformedEvidence,
    UntrustedChain,
)
from tests.attest.evidence.judging import device_rules, refusal
from tests.attest.evidence.vectors import vectors
from tests.attest.minting import CHALLENGE, DAY, NOW, issue
from tests.attest.minting.amd import Amd
from tests.attest.minting.nvidia import MEASUREMENTS, SWITCH, VBIOS, Nvidia, own_fields
from tests.codes import coded

GPU, SWITCH_CHIP, AMD = Nvidia(), Nvidia("LS_10", serial="48B02DFE0092CDDB"), Amd()
NONCE = CHALLENGE.device_nonce("snp")
GOOD = GPU.evidence(NONCE)
REPORT = GOOD.parts["report"]
REFERENCES = GPU.references()
THEN = datetime(2024, 6, 1, tzinfo=UTC)


def verify(evidence: DeviceEvidence, trust: Trust | None = None) -> AttestedDevice:
    return verify_nvidia(evidence, NONCE, trust or GPU.trust(*REFERENCES))


def refused(error: str, evidence: DeviceEvidence, trust: Trust | None = None) -> str:
    return refusal(error, lambda: verify(evidence, trust))


def changed(report: bytes) -> DeviceEvidence:
    return replace(GOOD, parts={"report": report})


def test_a_gpu_as_nvidia_made_it() -> None:
    device = verify(GOOD)
    assert (device.model, device.identity) == ("GH100", "NVIDIA:GH100:48B02D92494BADF4")
    assert device.firmware == {"vbios": "96.00.A5.00.01", "driver": "590.12"}
    assert device.reference == ("GH100 96.00.A5.00.01", "GH100 590.12")
    assert device.mismatches == ()
    assert device.switches == (SWITCH.hex(),)


def test_a_switch_and_a_blackwell() -> None:
    evidence = SWITCH_CHIP.evidence(NONCE)
    device = verify(evidence, SWITCH_CHIP.trust(*SWITCH_CHIP.references()))
    assert device.is_switch
    assert device.switches == (SWITCH.hex(),)
    assert device.mismatches == ()
    blackwell = Nvidia("GB100", firmware_oid="2.23.133.5.4.1.1")
    assert verify(blackwell.evidence(NONCE), blackwell.trust()).model == "GB100"


@pytest.mark.threat("E1")
def test_no_byte_of_the_report_can_be_changed() -> None:
    for at in range(0, len(REPORT), 61):
        bent = REPORT[:at] + bytes([REPORT[at] ^ 0x10]) + REPORT[at + 1 :]
        with pytest.raises((ForgedEvidence, MalformedEvidence)):
            verify(changed(bent))


@pytest.mark.threat("E1")
def test_cut_and_extended_reports() -> None:
    for bent in (REPORT[:-1], REPORT[:40], REPORT[:2000], REPORT + b"\0"):
        refused("evidence.malformed_evidence", changed(bent))
    refused("evidence.malformed_evidence", GPU.evidence(NONCE, measurements={}))
    refused("evidence.malformed_evidence", replace(GOOD, parts={"report": REPORT, "more": b"x"}))


def test_unknown_versions_and_models() -> None:
    refused("evidence.unknown_evidence", GPU.evidence(NONCE, version=0x12))
    other = Nvidia("GR100")
    refused("evidence.unknown_evidence", other.evidence(NONCE), other.trust())


def test_an_old_nonce() -> None:
    refused("evidence.not_bound", GPU.evidence(bytes(32)))


@pytest.mark.threat("E12")
def test_chains() -> None:
    refused("evidence.untrusted_chain", Nvidia().evidence(NONCE))
    refused("evidence.untrusted_chain", replace(GOOD, chain=GOOD.chain[:-1]))
    refused("evidence.untrusted_chain", replace(GOOD, chain=(GOOD.chain[0], *GOOD.chain[2:])))
    refused("evidence.forged_evidence", replace(GOOD, chain=GOOD.chain[1:]))
    refused("evidence.chain_expired", GOOD, GPU.trust(now=NOW + 101 * DAY))
    revoked = GPU.trust(lists=(GPU.identity.revocation_list(GPU.provisioner.certificate),))
    refused("evidence.chain_revoked", GOOD, revoked)


def test_another_devices_key_and_other_firmware_than_the_keys() -> None:
    sibling = Nvidia(root=GPU.root)
    refused("evidence.forged_evidence", replace(GOOD, chain=sibling.chain))
    other = Nvidia(firmware=bytes(48), root=GPU.root)
    assert "other firmware" in refused("evidence.forged_evidence", other.evidence(NONCE))


def test_a_certificate_that_names_no_device() -> None:
    leaf = issue("GH100 A01 GSP FMC LF", GPU.boot, ca=False)
    nameless = Nvidia(root=GPU.root)
    nameless.device, nameless.boot = leaf, GPU.boot
    nameless.provisioner, nameless.identity = GPU.provisioner, GPU.identity
    fields = {name: value for name, value in own_fields("GH100").items() if name != 20}
    said = refused("evidence.forged_evidence", nameless.evidence(NONCE, opaque=fields))
    assert "does not name the device" in said


# The evidence of a machine and of its devices


def machine(*devices: DeviceEvidence, challenge: Challenge = CHALLENGE) -> AttestedWorker:
    evidence = AMD.evidence(AMD.report(challenge=challenge, devices=devices), devices)
    trust = replace(AMD.trust(), nvidia=GPU.trust().nvidia, references=REFERENCES)
    return verify_evidence(parse_evidence(evidence.encode()), CHALLENGE, trust)


def test_a_machine_with_its_gpu() -> None:
    worker = machine(GOOD)
    assert [device.model for device in worker.devices] == ["GH100"]
    assert worker.not_after == min(
        AMD.leaf.not_valid_after_utc, GPU.device.certificate.not_valid_after_utc
    )
    shown = worker.as_json()["devices"][0]
    assert shown["reference"] == ["GH100 96.00.A5.00.01", "GH100 590.12"]


@pytest.mark.threat("E5")
def test_another_machines_gpu_evidence() -> None:
    """Another machine's GPU signed for this very challenge, but this machine did not list it."""
    elsewhere = Nvidia(root=GPU.root, serial="48B02DAAAAAAAAAA").evidence(NONCE)
    honest = AMD.evidence(devices=(GOOD,))
    trust = replace(AMD.trust(), nvidia=GPU.trust().nvidia)
    for devices in ((elsewhere,), (GOOD, elsewhere), ()):
        with pytest.raises(
            AttestationError, match="set of devices", check=coded("evidence.not_bound")
        ):
            verify_evidence(replace(honest, devices=devices), CHALLENGE, trust)


@pytest.mark.threat("E5")
def test_gpu_evidence_made_for_another_worker_time_or_kind_of_machine() -> None:
    for nonce in (
        Challenge(bytes(32), CHALLENGE.public_key).device_nonce("snp"),
        Challenge(CHALLENGE.nonce, b"another").device_nonce("snp"),
        CHALLENGE.device_nonce("tdx"),
        CHALLENGE.nonce,
    ):
        with pytest.raises(
            AttestationError, match="another machine", check=coded("evidence.not_bound")
        ):
            machine(GPU.evidence(nonce))


def test_a_kind_of_device_without_a_verifier() -> None:
    with pytest.raises(
        MalformedEvidence, match="devices of kind tpu", check=coded("evidence.unknown_evidence")
    ):
        machine(replace(GOOD, kind="tpu"))


# Reference measurements


def driver_file(**changes: object) -> bytes:
    some = {n: MEASUREMENTS[n] for n in (1, 3, 35)}
    return GPU.reference_file("590.12", some, **changes)  # type: ignore[arg-type]


@pytest.mark.threat("E8")
def test_a_reference_is_what_nvidia_signed() -> None:
    good = driver_file()
    read = GPU.reference(good)
    assert (read.model, read.version) == ("GH100", "590.12")
    assert read.measurements[3] == {MEASUREMENTS[3]}
    with pytest.raises(TypeError, match="comes from verify_reference only"):
        Reference("1", "GH100", {}, NOW, NOW, (), (), seal=object())
    for bent in (
        good.replace(b"0303", b"0304", 1),
        good.replace(b"590.12", b"590.13", 1),
        good.replace(b'active="True"', b'active="False"', 1),
        good.replace(b"<r:Payload>", b'<r:Payload><r:Resource index="9"/>', 1),
    ):
        assert bent != good
        with pytest.raises(ForgedEvidence):
            GPU.reference(bent)
    for bent in (b"", b"<a>", good[:-5], b'<!DOCTYPE a [<!ENTITY b "c">]>' + good):
        with pytest.raises(MalformedEvidence):
            GPU.reference(bent)


@pytest.mark.threat("E8")
def test_a_reference_by_a_look_alike_or_without_a_signature() -> None:
    with pytest.raises(UntrustedChain):
        GPU.reference(Nvidia().reference_file("590.12", {1: bytes(48)}))
    stranger = issue("HCC RIM L4 Signer", None, ca=False, usage=["digital_signature"])
    with pytest.raises(UntrustedChain):
        GPU.reference(driver_file(signer=stranger))
    bare = driver_file()
    with pytest.raises(UntrustedChain):
        GPU.reference(bare[: bare.index(b"<ds:Signature")] + b"</SoftwareIdentity>")


@pytest.mark.threat("E8")
def test_a_signed_reference_wrapped_in_another_is_not_read() -> None:
    good = driver_file()
    fake = good.replace(b"590.12", b"999.99").replace(b"03" * 48, b"ff" * 48)
    inner = good[good.index(b"<SoftwareIdentity") :]
    wrapped = fake[: fake.index(b"<ds:Signature")] + inner + b"</SoftwareIdentity>"
    with pytest.raises((UntrustedChain, ForgedEvidence)):
        GPU.reference(wrapped)
    moved = fake.replace(b"</r:Payload>", b"</r:Payload>" + inner, 1)
    with pytest.raises((UntrustedChain, ForgedEvidence)):
        GPU.reference(moved)


def test_a_reference_whose_signer_was_revoked() -> None:
    gone = GPU.reference_root.revocation_list(GPU.reference_signer.certificate)
    roots = frozenset({GPU.reference_root.fingerprint})
    with pytest.raises(UntrustedChain, check=coded("evidence.chain_revoked")):
        verify_reference(driver_file(), Trust(NOW, lists=(gone,)), roots)


def test_references_out_of_date() -> None:
    with pytest.raises(UntrustedChain, check=coded("evidence.chain_expired")):
        GPU.reference(driver_file(), NOW + 1001 * DAY)
    late = replace(GPU.trust(*REFERENCES), now=NOW + 1001 * DAY)
    evidence = Nvidia(root=GPU.root, leaf_days=3000).evidence(NONCE)
    refused("evidence.chain_expired", evidence, late)


def test_measurements_are_held_against_the_references_of_the_very_firmware() -> None:
    bent = GPU.evidence(NONCE, measurements=MEASUREMENTS | {4: bytes(48), 9: bytes(48)})
    assert verify(bent).mismatches == (4, 9)
    fewer = {n: v for n, v in MEASUREMENTS.items() if n != 5}
    assert verify(GPU.evidence(NONCE, measurements=fewer)).mismatches == (5,)
    newer = GPU.evidence(NONCE, opaque=own_fields("GH100") | {3: b"591.0\0"})
    assert verify(newer).unreferenced == ("driver",)
    assert verify(newer).reference == (f"GH100 {VBIOS}",)
    off = own_fields("GH100") | {11: b"\x55"}
    without = MEASUREMENTS | {35: bytes(48)}
    assert verify(GPU.evidence(NONCE, measurements=without)).mismatches == (35,)
    assert verify(GPU.evidence(NONCE, measurements=without, opaque=off)).mismatches == ()


def test_two_references_for_one_measurement_contradict_each_other() -> None:
    both = tuple(
        GPU.reference(GPU.reference_file(version, MEASUREMENTS))
        for version in ("590.12", "96.00.A5.00.01")
    )
    assert len(verify(GOOD, GPU.trust(*both)).mismatches) == len(MEASUREMENTS)


def test_of_several_references_for_one_version_the_fitting_one_is_used() -> None:
    other_board = GPU.reference(GPU.reference_file("96.00.A5.00.01", {0: bytes([9]) * 48}))
    assert verify(GOOD, GPU.trust(other_board, *REFERENCES)).mismatches == ()


def test_without_signxml_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    data = driver_file()
    monkeypatch.setitem(sys.modules, "signxml", None)
    with pytest.raises(
        ConfigurationError, match=r"sealring\[nvidia\]", check=coded("configuration.missing_extra")
    ):
        GPU.reference(data)


# NVIDIA's own evidence


def chain_of(pem: bytes) -> tuple[bytes, ...]:
    return tuple(one.public_bytes(Encoding.DER) for one in x509.load_pem_x509_certificates(pem))


def real() -> list[tuple[bytes, tuple[bytes, ...]]]:
    folder = vectors("nvidia")
    single = bytes.fromhex((folder / "hopperAttestationReport.txt").read_text().strip())
    found = [(single, chain_of((folder / "hopperCertChain.txt").read_bytes()))]
    for one in json.loads((folder / "gpu_evidence.json").read_bytes()):
        chain = chain_of(base64.b64decode(one["certificate"]))
        found.append((base64.b64decode(one["evidence"]), chain))
    return found


def test_real_gpus_verify_under_the_pinned_root() -> None:
    identities = set()
    for raw, chain in real():
        report, _, model = verify_report(raw, chain, Trust(THEN))
        device = verify_nvidia(
            DeviceEvidence("nvidia", {"report": canonical_report(raw)}, chain),
            report.nonce,
            Trust(THEN),
        )
        identities.add(device.identity)
        assert model == "GH100"
        assert device.firmware["vbios"].startswith("96.00.")
    assert len(identities) == 9


def test_eight_gpus_of_one_machine_are_linked_to_the_same_four_switches() -> None:
    linked = set()
    for raw, chain in real()[1:]:
        nonce = verify_report(raw, chain, Trust(THEN))[0].nonce
        evidence = DeviceEvidence("nvidia", {"report": canonical_report(raw)}, chain)
        linked.add(verify_nvidia(evidence, nonce, Trust(THEN)).switches)
    assert len(linked) == 1
    assert len(linked.pop()) == 4


def real_machine() -> list[AttestedDevice]:
    """The eight GPUs and four switches of one machine, from NVIDIA's files."""
    shown = []
    for name in ("gpu_evidence.json", "hgx-4-switches.json"):
        for one in json.loads((vectors("nvidia") / name).read_bytes()):
            report = canonical_report(base64.b64decode(one["evidence"]))
            chain = chain_of(base64.b64decode(one["certificate"]))
            evidence = DeviceEvidence("nvidia", {"report": report}, chain)
            shown.append(verify_nvidia(evidence, bytes.fromhex(one["nonce"]), Trust(THEN)))
    return shown


@pytest.mark.threat("E6")
def test_a_real_machine_of_eight_gpus_and_four_switches_is_one_machine() -> None:
    devices = real_machine()
    assert refused_devices(devices) == []
    assert all(len(one.gpus) == 8 for one in devices if one.is_switch)
    # Other counts, or missing switches, are refused by name.
    assert refused_devices(devices, gpus=9) == ["gpus"]
    gpus = [one for one in devices if not one.is_switch]
    assert refused_devices(gpus, switches=0) == ["switches of gpus"]
    assert refused_devices(devices[:-1], switches=0) == ["links of gpus"]
    assert refused_devices(devices[1:], gpus=7, switches=0) == ["links of switches"]


def refused_devices(devices: list[AttestedDevice], gpus: int = 8, switches: int = 4) -> list[str]:
    rules = device_rules(gpus=gpus, switches=switches, require_reference=False)
    worker = replace(describe_evidence(AMD.evidence(), AMD.trust()), devices=tuple(devices))
    return [one.name for one in rules.judge(worker) if one.refusal]


@pytest.mark.threat("E1")
def test_every_field_of_a_real_report_changed_in_turn() -> None:
    raw, chain = real()[1]
    blocks = 37 + 8
    fields = [0, 1, 2, 3, 4, 36, 37, 38, 39, 40, 41, 42]
    for block in range(64):
        inner = (0, 1, 2, 4, 5, 7) if block % 16 == 0 else (7,)
        fields += [blocks + 55 * block + at for at in inner]
    at = blocks + 55 * 64
    fields += [at, at + 32]
    at += 34
    while at < len(raw) - 96:
        fields += [at, at + 2, at + 4]
        at += 4 + int.from_bytes(raw[at + 2 : at + 4], "little")
    assert at == len(raw) - 96
    fields += [at, at + 48]
    for one in fields:
        bent = raw[:one] + bytes([raw[one] ^ 1]) + raw[one + 1 :]
        with pytest.raises((ForgedEvidence, MalformedEvidence)):
            verify_report(bent, chain, Trust(THEN))


@pytest.mark.threat("E1")
def test_their_broken_variants_do_not() -> None:
    (raw, chain), (_, others), *_ = real()
    for at in range(0, len(raw), 97):
        bent = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        with pytest.raises((ForgedEvidence, MalformedEvidence)):
            verify_report(bent, chain, Trust(THEN))
    for bent in (raw[:-1], raw + b"\0"):
        with pytest.raises(MalformedEvidence):
            verify_report(bent, chain, Trust(THEN))
    with pytest.raises(ForgedEvidence):
        verify_report(raw, others, Trust(THEN))
    text = (vectors("nvidia") / "hopperAttestationReportInvalidSignature.txt").read_text()
    invalid = bytes.fromhex(text.strip())
    with pytest.raises((ForgedEvidence, MalformedEvidence)):
        verify_report(invalid, chain, Trust(THEN))


def test_real_references_verify_at_their_own_dates() -> None:
    folder = vectors("nvidia")
    driver = verify_reference((folder / "Driver_RIM_test_no_gpu.swidtag").read_bytes(), Trust(THEN))
    assert (driver.model, driver.version, len(driver.measurements)) == ("GH100", "545.00", 21)
    vbios_file = folder / "1010_0200_882_96005E0001_test_no_gpu.swidtag"
    vbios = verify_reference(vbios_file.read_bytes(), Trust(THEN))
    assert (vbios.version, len(vbios.measurements)) == ("96.00.5E.00.01", 12)
    with pytest.raises(UntrustedChain, check=coded("evidence.chain_expired")):
        verify_reference(vbios_file.read_bytes(), Trust(datetime(2026, 6, 1, tzinfo=UTC)))
    wrong = (folder / "incorrect_signature_driver_rim.xml").read_bytes()
    with pytest.raises(ForgedEvidence):
        verify_reference(wrong, Trust(datetime(2025, 6, 1, tzinfo=UTC)))
