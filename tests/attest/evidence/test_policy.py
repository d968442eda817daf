"""SIMULATED evidence, and what a policy admits, what it refuses, and how it names mistakes."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from sealring.attest.evidence import AttestedWorker, Challenge, Trust, judge, parse_policy
from sealring.attest.evidence.simulated import Simulator
from sealring.attest.evidence.verify import verify_evidence
from sealring.errors import AttestationError, BadPolicy, PolicyRefusal, SealringError, named
from tests.attest.evidence.minting import (
    CHALLENGE,
    CHIP,
    DAY,
    MEASUREMENT,
    NOW,
    PLAIN_POLICY,
    Amd,
)
from tests.attest.minting.intel import MRSIGNER, MRTD, Intel
from tests.attest.minting.nvidia import MEASUREMENTS, Nvidia
from tests.attest.minting.tpm import BOOT, AzureGuest, Maker, Measured, event_log, pcr_values
from tests.codes import coded

AMD = Amd()
SIMULATOR = Simulator.create(NOW)
TRUST = Trust(NOW, simulated=frozenset({SIMULATOR.fingerprint}))
POLICY = f"""\
version = 1
rejoins = 3

[freshness]
revocation_list_days = 7

[snp]
measurements = ["{MEASUREMENT.hex()}"]
minimum_tcb = {{Milan = {{bootloader = 3, tee = 0, snp = 8, microcode = 100}}}}
platform_info = {{alias_check = true}}

[simulated]
roots = ["{SIMULATOR.fingerprint}"]
measurements = ["abcd"]
minimum_tcb = {{simulated = 1}}

[[ranks]]
ranks = "0-3"
kinds = ["snp"]

[[ranks]]
ranks = "4"
kinds = ["snp", "simulated"]
"""
ONLY_SNP = POLICY[: POLICY.index("[simulated]")]
PCR0, PCR4, PCR7 = (pcr_values(BOOT)[pcr].hex() for pcr in (0, 4, 7))
KERNEL = BOOT[3].digest.hex()
EVERY_KIND = f"""\
version = 1

[freshness]
require_revocation_lists = false

[tpm]
roots = ["{"ab" * 32}"]
pcrs = {{0 = ["{PCR0}"], 4 = ["{PCR4}"], 7 = ["{PCR7}"]}}
events = {{4 = ["{BOOT[2].digest.hex()}", "{KERNEL}"]}}
unchecked = ["ima"]

[az-snp-vtpm]
measurements = ["{MEASUREMENT.hex()}"]
pcrs = {{4 = ["{PCR4}"], 7 = ["{PCR7}"]}}
unchecked = ["minimum_tcb", "platform_info", "ima"]

[tdx]
measurements = ["{MRTD.hex()}"]
registers = {{rtmr1 = ["{"a1" * 48}"]}}
unchecked = ["rtmr0", "rtmr2"]
minimum_tcb = {{module = 5, evaluation = 17}}

[sgx]
signers = ["{MRSIGNER.hex()}"]
registers = {{isvprodid = ["0007"]}}
minimum_tcb = {{isvsvn = 3}}
tcb_status = ["UpToDate", "SWHardeningNeeded"]

[simulated]
roots = ["{"cd" * 32}"]
measurements = ["abcd"]

[snp]
measurements = ["{MEASUREMENT.hex()}"]
unchecked = ["minimum_tcb", "platform_info"]

[nvidia]
gpus = 1
switches = 1
models = ["GH100", "LS_10"]
drivers = ["590.12"]
vbios = ["96.00.A5.00.01"]
"""


def snp(days_old: int = 1, **changes: object) -> AttestedWorker:
    evidence = AMD.evidence(AMD.report(**changes))  # type: ignore[arg-type]
    return verify_evidence(evidence, CHALLENGE, AMD.trust(AMD.revocation_list(days_old=days_old)))


def simulated(measurement: bytes = b"\xab\xcd", **changes: object) -> AttestedWorker:
    evidence = SIMULATOR.attest(CHALLENGE, measurement, **changes)  # type: ignore[arg-type]
    return verify_evidence(evidence, CHALLENGE, TRUST)


def refused(error: str, worker: AttestedWorker, rank: int = 4) -> str:
    verdict = judge(parse_policy(POLICY), worker, rank)
    assert not verdict.admitted
    with pytest.raises(AttestationError) as caught:
        verdict.require()
    assert named(caught.value) == error
    return str(caught.value)


def test_what_the_policy_describes_is_admitted() -> None:
    policy = parse_policy(POLICY)
    for worker, rank in ((snp(), 0), (snp(), 4), (simulated(), 4), (simulated(), None)):
        verdict = judge(policy, worker, rank)
        verdict.require()
        assert verdict.admitted
    assert (policy.rejoins, policy.revocation_list_days, policy.nonce_seconds) == (3, 7, 120)


@pytest.mark.threat("E16")
def test_what_it_does_not_describe_is_refused() -> None:
    refused("policy.debug_guest", snp(policy=PLAIN_POLICY | 1 << 19))
    refused("policy.debug_guest", simulated(debug=True))
    refused("policy.measurement_not_allowed", snp(measurement=bytes(48)))
    refused("policy.measurement_not_allowed", simulated(b"\xab"))
    refused("policy.guest_not_allowed", snp(vmpl=1))
    refused("policy.guest_not_allowed", snp(policy=PLAIN_POLICY | 1 << 18))
    refused("policy.tcb_too_old", simulated(tcb=0))
    refused("policy.rank_not_allowed", simulated(), 3)
    refused("policy.rank_not_allowed", snp(), 5)
    refused("evidence.stale_revocation_list", snp(days_old=8))


@pytest.mark.threat("E16")
def test_a_tcb_below_the_minimum_and_another_product() -> None:
    tcb = {"bootloader": 3, "tee": 0, "snp": 7, "microcode": 99}
    old = Amd("Genoa", tcb=tcb)
    worker = verify_evidence(old.evidence(), CHALLENGE, old.trust(old.revocation_list()))
    assert "tcb: Genoa, not Milan of at least" in refused("policy.tcb_too_old", worker)
    old = Amd(tcb=tcb)
    worker = verify_evidence(old.evidence(), CHALLENGE, old.trust(old.revocation_list()))
    said = refused("policy.tcb_too_old", worker)
    assert "tcb snp: 7, not at least 8; tcb microcode: 99, not at least 100" in said


def test_each_product_has_its_own_minimum() -> None:
    """Turin has one more part than the others, and its numbers are small."""
    both = POLICY.replace(
        "minimum_tcb = {Milan",
        "minimum_tcb = {Turin = {fmc = 1, bootloader = 1, tee = 1, snp = 3, microcode = 70}, Milan",
    )
    turin = Amd("Turin", tcb={"fmc": 1, "bootloader": 1, "tee": 1, "snp": 3, "microcode": 70})
    listed = turin.trust(turin.revocation_list())
    worker = verify_evidence(turin.evidence(turin.report(chip=CHIP)), CHALLENGE, listed)
    assert judged(worker, both) == []
    assert judged(snp(), both) == []
    old = Amd("Turin", tcb={"fmc": 0, "bootloader": 1, "tee": 1, "snp": 3, "microcode": 70})
    worker = verify_evidence(old.evidence(), CHALLENGE, old.trust(old.revocation_list()))
    assert judged(worker, both) == [
        ("tcb fmc", "policy.tcb_too_old"),
        ("launch tcb fmc", "policy.tcb_too_old"),
    ]


@pytest.mark.threat("E12")
def test_revocation_lists_are_needed_unless_the_policy_says_otherwise() -> None:
    worker = verify_evidence(AMD.evidence(), CHALLENGE, AMD.trust())
    refused("evidence.stale_revocation_list", worker)
    relaxed = POLICY.replace("[freshness]", "[freshness]\nrequire_revocation_lists = false")
    assert judge(parse_policy(relaxed), worker, 0).admitted


@pytest.mark.threat("E22")
def test_simulated_evidence_needs_to_be_named_and_says_so_everywhere() -> None:
    worker = simulated()
    with pytest.raises(PolicyRefusal, match="SIMULATED", check=coded("policy.kind_not_allowed")):
        judge(parse_policy(ONLY_SNP), worker, None).require()
    assert worker.label == "SIMULATED"
    assert worker.as_json()["label"] == "SIMULATED"
    assert "SIMULATED" in SIMULATOR.certificate.subject.rfc4514_string()
    assert parse_policy(ONLY_SNP).simulated_roots == frozenset()


@pytest.mark.threat("E22")
def test_simulated_evidence_is_held_to_the_same() -> None:
    good = SIMULATOR.attest(CHALLENGE, b"\xab\xcd")
    other = SIMULATOR.attest(Challenge(bytes(32), CHALLENGE.public_key), b"\xab\xcd")
    cut = {**good.parts, "statement": good.parts["statement"][:-1]}
    nothing = {"statement": b"{}", "signature": SIMULATOR.key.sign(b"{}")}
    for error, evidence, trust in (
        ("evidence.untrusted_chain", Simulator.create(NOW).attest(CHALLENGE, b"\xab\xcd"), TRUST),
        ("evidence.untrusted_chain", good, Trust(NOW)),
        ("evidence.forged_evidence", replace(good, parts=cut), TRUST),
        ("evidence.malformed_evidence", replace(good, parts=nothing), TRUST),
        ("evidence.not_bound", other, TRUST),
        ("evidence.chain_expired", good, replace(TRUST, now=NOW + 31 * DAY)),
        ("evidence.chain_expired", good, replace(TRUST, now=NOW - timedelta(hours=1))),
    ):
        with pytest.raises(SealringError, check=coded(error)) as caught:
            verify_evidence(evidence, CHALLENGE, trust)
        assert named(caught.value) == error


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("version = 1", "version = 2", "line 1: version is 1"),
        ("rejoins = 3", "rejoin = 3", "line 2: rejoin is not known here"),
        ("rejoins = 3", "rejoins = -1", "line 2: rejoins is a number from 0 to 1000"),
        ("_days = 7", "_days = true", "line 5: freshness.revocation_list_days is a number"),
        (MEASUREMENT.hex(), "5A", "line 8: snp.measurements is a list of lower-case hexadecimal"),
        ("snp = 8", "snp = 800", "line 9: snp.minimum_tcb.Milan.snp is a number from 0 to 255"),
        ("snp = 8", "psp = 8", "line 9: snp.minimum_tcb.Milan.psp is not known here"),
        ("snp = 8, ", "", "line 9: snp.minimum_tcb.Milan does not state snp"),
        ("alias_check = true", "alias_check = 1", "line 10: snp.platform_info.alias_check is true"),
        ("alias_check", "aliases", "line 10: snp.platform_info.aliases is not known here"),
        ('["abcd"]', "[]", "line 14: simulated.measurements is empty or missing"),
        ('roots = ["', 'root = ["', "line 13: simulated.root is not known here"),
        ('"0-3"', '"3-0"', "ranks.ranks is"),
        ('kinds = ["snp"]', 'kinds = ["tdx"]', "ranks.kinds is a list of kinds that this policy"),
        ("[snp]", "[snp", "the policy is not TOML"),
        ("[snp]", "debug = true\n[snp]", "freshness.debug is not known here"),
    ],
)
def test_a_mistake_in_the_policy_is_named_with_its_line(old: str, new: str, said: str) -> None:
    assert old in POLICY
    with pytest.raises(BadPolicy) as caught:
        parse_policy(POLICY.replace(old, new, 1))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('["UpToDate", "SWHardeningNeeded"]', "[]", "sgx.tcb_status is empty or missing"),
        ('["UpToDate", "SWHardeningNeeded"]', '["Revoked"]', "sgx.tcb_status is a list of Conf"),
        (f'rtmr1 = ["{"a1" * 48}"]', "rtmr1 = []", "tdx.registers.rtmr1 is empty or missing"),
        (f'rtmr1 = ["{"a1" * 48}"]', "rtmr4 = []", "tdx.registers.rtmr4 is not known here"),
        ('models = ["GH100", "LS_10"]', 'models = ["GA100"]', "nvidia.models is a list of GB100"),
        ("gpus = 1", "gpus = 17", "nvidia.gpus is a number from 0 to 16"),
        ('drivers = ["590.12"]', "drivers = [590]", "nvidia.drivers is a list of words"),
        (f'roots = ["{"ab" * 32}"]', "", "tpm.roots is empty or missing"),
        ("[nvidia]", "[nvidia]\ndebug = true", "nvidia.debug is not known here"),
    ],
)
def test_a_mistake_in_the_other_kinds_is_named_too(old: str, new: str, said: str) -> None:
    assert old in EVERY_KIND
    with pytest.raises(BadPolicy) as caught:
        parse_policy(EVERY_KIND.replace(old, new, 1))
    assert said in str(caught.value)


def test_a_policy_that_admits_nothing_is_a_mistake() -> None:
    with pytest.raises(BadPolicy, match="admits nothing"):
        parse_policy("version = 1")


def judged(worker: AttestedWorker, policy: str = EVERY_KIND) -> list[tuple[str, str]]:
    """The name and the error of each rule that fails."""
    rules = judge(parse_policy(policy), worker, None).rules
    return [(rule.name, rule.refusal) for rule in rules if rule.refusal is not None]


WITHOUT_GPUS = EVERY_KIND[: EVERY_KIND.index("[nvidia]")]


def test_a_tpm_is_judged_by_its_pcrs_and_by_what_was_measured_into_them() -> None:
    maker = Maker()
    worker = verify_evidence(maker.evidence(), maker.challenge(), maker.trust())
    assert judged(worker, WITHOUT_GPUS) == []
    unquoted = maker.evidence(pcrs=(0, 7))
    worker = verify_evidence(unquoted, maker.challenge(), maker.trust())
    assert ("pcr4", "policy.measurement_not_allowed") in judged(worker, WITHOUT_GPUS)
    odd = Maker(events=(*BOOT, Measured(4, 1, b"rootkit")))
    worker = verify_evidence(odd.evidence(), odd.challenge(), odd.trust())
    failed = judged(worker, WITHOUT_GPUS)
    assert failed == [
        ("pcr4", "policy.measurement_not_allowed"),
        ("pcr4 events", "policy.measurement_not_allowed"),
    ]
    silent = odd.evidence(log=event_log(()))
    worker = verify_evidence(silent, odd.challenge(), odd.trust())
    assert ("pcr4 events", "policy.measurement_not_allowed") in judged(worker, WITHOUT_GPUS)


@pytest.mark.threat("E3")
def test_no_policy_can_rest_on_a_pcr_that_can_be_reset() -> None:
    for pcr in (16, 23, 24):
        bad = EVERY_KIND.replace("pcrs = {0 ", f"pcrs = {{{pcr} ", 1)
        with pytest.raises(BadPolicy) as caught:
            parse_policy(bad)
        assert f"tpm.pcrs.{pcr} is not known here" in str(caught.value)


def test_a_virtual_tpm_needs_its_guest_to_be_known_too() -> None:
    guest = AzureGuest(AMD)
    worker = verify_evidence(guest.evidence(), CHALLENGE, AMD.trust())
    assert judged(worker, WITHOUT_GPUS) == []
    open_boot = AzureGuest(AMD, secure_boot=False)
    worker = verify_evidence(open_boot.evidence(), CHALLENGE, AMD.trust())
    assert judged(worker, WITHOUT_GPUS) == [("insecure_boot", "policy.guest_not_allowed")]
    pcrs = WITHOUT_GPUS.replace(f'pcrs = {{4 = ["{PCR4}"], 7 = ["{PCR7}"]}}\n', "")
    with pytest.raises(BadPolicy, match="pcrs is empty or missing"):
        parse_policy(pcrs)


@pytest.mark.threat("E16")
def test_intel_status_tcb_registers_and_debug() -> None:
    intel = Intel()
    good = verify_evidence(intel.evidence(), CHALLENGE, intel.trust())
    assert judged(good, WITHOUT_GPUS) == []
    late = intel.trust(intel.collateral(status="OutOfDate"))
    worker = verify_evidence(intel.evidence(), CHALLENGE, late)
    assert judged(worker, WITHOUT_GPUS) == [("tcb status", "policy.tcb_too_old")]
    newer = WITHOUT_GPUS.replace("module = 5", "module = 6")
    assert judged(good, newer) == [("tcb module", "policy.tcb_too_old")]
    other = WITHOUT_GPUS.replace("a1" * 48, "a2" * 48)
    assert judged(good, other) == [("rtmr1", "policy.measurement_not_allowed")]
    soft = intel.trust(intel.collateral("sgx", status="SWHardeningNeeded"))
    worker = verify_evidence(intel.evidence("sgx"), CHALLENGE, soft)
    assert judged(worker, WITHOUT_GPUS) == []


def machine(*devices: Nvidia, references: bool = True, **changes: object) -> AttestedWorker:
    nonce = CHALLENGE.device_nonce("snp")
    shown = tuple(device.evidence(nonce, **changes) for device in devices)
    trust = replace(
        AMD.trust(),
        nvidia=frozenset(device.root.fingerprint for device in devices),
        references=tuple(one for device in devices for one in device.references())
        if references
        else (),
    )
    return verify_evidence(AMD.evidence(devices=shown), CHALLENGE, trust)


@pytest.mark.threat("E7")
def test_gpus_and_switches() -> None:
    gpu, switch = Nvidia(), Nvidia("LS_10", serial="48B02DFE0092CDDB")
    worker = machine(gpu, switch)
    assert judged(worker) == []
    assert judged(worker, WITHOUT_GPUS) == [("devices", "policy.device_not_allowed")]
    assert judged(machine(gpu)) == [("switches", "policy.device_not_allowed")]
    assert ("gpus", "policy.device_not_allowed") in judged(machine(switch))
    twice = EVERY_KIND.replace("gpus = 1", "gpus = 2")
    assert judged(machine(gpu, gpu, switch), twice) == [("gpus", "policy.device_not_allowed")]
    blackwell = machine(Nvidia("GB100"), switch)
    assert ("NVIDIA:GB100:48B02D92494BADF4 model", "policy.device_not_allowed") in judged(blackwell)
    for old, name in (('"590.12"', "driver"), ('"96.00.A5.00.01"', "vbios")):
        failed = judged(worker, EVERY_KIND.replace(old, '"1"'))
        assert ("NVIDIA:GH100:48B02D92494BADF4 " + name, "policy.device_not_allowed") in failed


@pytest.mark.threat("E7")
def test_measurements_that_are_not_nvidias_or_that_no_reference_covers() -> None:
    only_gpu = EVERY_KIND.replace("switches = 1", "switches = 0")
    name = "NVIDIA:GH100:48B02D92494BADF4 measurements"
    bent = machine(Nvidia(), measurements=MEASUREMENTS | {9: bytes(48)})
    assert judged(bent, only_gpu) == [(name, "policy.measurement_not_allowed")]
    assert bent.devices[0].mismatches == (9,)
    unknown = machine(Nvidia(), references=False)
    assert judged(unknown, only_gpu) == [(name, "policy.measurement_not_allowed")]
    assert judged(unknown, only_gpu + "require_reference = false\n") == []


@pytest.mark.threat("E5")
def test_a_gpu_linked_to_a_switch_of_another_machine() -> None:
    switch = Nvidia("LS_10")
    nonce = CHALLENGE.device_nonce("snp")
    gpu = Nvidia()
    foreign = gpu.evidence(nonce, opaque={3: b"590.12\0", 22: bytes(range(8)) * 18})
    trust = replace(AMD.trust(), nvidia=frozenset({gpu.root.fingerprint, switch.root.fingerprint}))
    devices = (foreign, switch.evidence(nonce))
    worker = verify_evidence(AMD.evidence(devices=devices), CHALLENGE, trust)
    assert ("links of gpus", "policy.device_not_allowed") in judged(worker)


def test_every_devices_chain_needs_a_list_of_its_own() -> None:
    gpu = Nvidia()
    nonce = CHALLENGE.device_nonce("snp")
    trust = replace(AMD.trust(AMD.revocation_list()), nvidia=frozenset({gpu.root.fingerprint}))
    strict = EVERY_KIND.replace("require_revocation_lists = false", "")
    evidence = AMD.evidence(devices=(gpu.evidence(nonce),))
    worker = verify_evidence(evidence, CHALLENGE, trust)
    assert ("revocation", "evidence.stale_revocation_list") in judged(worker, strict)
    issuers = (gpu.root, gpu.identity, gpu.provisioner)
    listed = replace(trust, lists=(*trust.lists, *(one.revocation_list() for one in issuers)))
    worker = verify_evidence(evidence, CHALLENGE, listed)
    assert ("revocation", "evidence.stale_revocation_list") not in judged(worker, strict)
