"""GPUs and switches of different machines, shown as those of one machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sealring.attest.evidence import verify_evidence
from sealring.attest.evidence.evidence import DeviceEvidence
from sealring.attest.evidence.rules import Rules
from sealring.errors import MalformedEvidence
from tests.attest.evidence.judging import device_rules
from tests.attest.minting import CHALLENGE, issue
from tests.attest.minting.amd import Amd
from tests.attest.minting.nvidia import SWITCH, Nvidia, own_fields

AMD = Amd()
ROOT = issue("NVIDIA Device Identity CA", None, ca=True)
GPUS = [Nvidia(serial=f"48B02D92494BADF{n}", root=ROOT) for n in range(3)]
SWITCHES = [Nvidia("LS_10", serial=f"48B02DFE0092CDD{n}", root=ROOT) for n in range(2)]
OWN = [SWITCH, SWITCH[::-1]]
LINKS = b"".join(one[::-1] for one in OWN) * 9
RULES = device_rules(gpus=2, switches=1, require_reference=False)
NONCE = CHALLENGE.device_nonce("snp")


def gpu(n: int, links: bytes = LINKS) -> DeviceEvidence:
    return GPUS[n].evidence(NONCE, opaque=own_fields("GH100") | {22: links})


def switch(n: int, gpus: int = 3, links: bytes | None = None) -> DeviceEvidence:
    fields = own_fields("LS_10", gpus) | {22: OWN[n]}
    return SWITCHES[n].evidence(NONCE, opaque=fields if links is None else fields | {26: links})


def failed(*devices: DeviceEvidence, rules: Rules = RULES) -> list[tuple[str, str]]:
    trust = replace(AMD.trust(), nvidia=frozenset({ROOT.fingerprint}))
    worker = verify_evidence(AMD.evidence(devices=devices), CHALLENGE, trust)
    return [(one.name, one.refusal) for one in rules.judge(worker) if one.refusal]


def test_devices_that_belong_together() -> None:
    assert failed(gpu(0), gpu(1), gpu(2), switch(0), switch(1)) == []


@pytest.mark.threat("E5")
def test_a_gpu_that_is_linked_to_none_of_the_switches() -> None:
    for links in (b"", bytes(144), bytes(range(8)) * 18, OWN[0][::-1]):
        shown = (gpu(0), gpu(1), gpu(2, links), switch(0), switch(1))
        assert failed(*shown) == [("links of gpus", "policy.device_not_allowed")]


@pytest.mark.threat("E5")
def test_a_switch_that_none_of_the_gpus_is_linked_to() -> None:
    other = Nvidia("LS_10", serial="48B02DFE0092CDDF", root=ROOT)
    foreign = other.evidence(NONCE, opaque=own_fields("LS_10", 3) | {22: b"foreign."})
    shown = (gpu(0), gpu(1), gpu(2), switch(0), switch(1), foreign)
    assert failed(*shown) == [("links of gpus", "policy.device_not_allowed")]


@pytest.mark.threat("E5")
def test_a_gpu_on_the_same_switches_that_is_not_shown() -> None:
    assert failed(gpu(0), gpu(1), switch(0), switch(1)) == [
        ("links of switches", "policy.device_not_allowed")
    ]


@pytest.mark.threat("E5")
def test_switches_that_are_linked_to_different_gpus_or_tell_none() -> None:
    for links in (b"", (b"another." + b"\x90" * 8 + b"\x91" * 8).ljust(128, b"\0")):
        shown = (gpu(0), gpu(1), gpu(2), switch(0), switch(1, links=links))
        assert failed(*shown) == [("links of switches", "policy.device_not_allowed")]


@pytest.mark.threat("E6")
def test_a_switch_whose_list_of_gpus_is_cut() -> None:
    cut = switch(1, links=b"\x90" * 8)
    with pytest.raises(MalformedEvidence, match="list of GPUs is cut"):
        failed(gpu(0), gpu(1), gpu(2), switch(0), cut)


@pytest.mark.parametrize(
    "says", [{21: b"\xaa"}, {36: b"\2\0"}, {21: b"\x55", 36: b"\2\0"}, {21: b"\1"}]
)
@pytest.mark.threat("E6")
def test_gpus_in_protected_pcie_mode_whose_switches_are_left_out(says: dict[int, bytes]) -> None:
    rules = device_rules(gpus=2, switches=0, require_reference=False)
    protected = [
        GPUS[n].evidence(NONCE, opaque=own_fields("GH100") | {22: LINKS} | says) for n in range(3)
    ]
    assert failed(*protected, rules=rules) == [("switches of gpus", "policy.device_not_allowed")]
    some = failed(*protected, switch(0), rules=rules)
    assert some == [("links of gpus", "policy.device_not_allowed")]
    assert failed(*protected, switch(0), switch(1), rules=rules) == []
    for off in ({}, {21: b"\x55"}, {21: b"\x55", 36: b"\0\0"}, {36: b"\1\0"}):
        alone = own_fields("GH100") | off
        shown = [GPUS[n].evidence(NONCE, opaque=alone) for n in range(2)]
        assert failed(*shown, rules=rules) == []
