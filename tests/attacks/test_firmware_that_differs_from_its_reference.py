"""A device's firmware differs from NVIDIA's reference, and another reference is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sealring.attest.evidence import verify_evidence
from sealring.attest.evidence.worker import AttestedDevice
from tests.attest.evidence.judging import device_rules
from tests.attest.minting import CHALLENGE
from tests.attest.minting.amd import Amd
from tests.attest.minting.nvidia import DRIVER, MEASUREMENTS, VBIOS, Nvidia

AMD, GPU = Amd(), Nvidia()


@pytest.mark.parametrize(("version", "index"), [(VBIOS, 8), (DRIVER, 9)])
@pytest.mark.threat("E7")
def test_a_device_that_differs_from_the_one_reference_that_is_at_hand(
    version: str, index: int
) -> None:
    (known,) = [one for one in GPU.references() if one.version == version]
    trust = replace(AMD.trust(), nvidia=frozenset({GPU.root.fingerprint}), references=(known,))
    nonce = CHALLENGE.device_nonce("snp")
    lenient = device_rules(require_reference=False)

    def judged(measurements: dict[int, bytes]) -> tuple[set[object], AttestedDevice]:
        devices = (GPU.evidence(nonce, measurements=measurements),)
        worker = verify_evidence(AMD.evidence(devices=devices), CHALLENGE, trust)
        return {one.refusal for one in lenient.judge(worker)}, worker.devices[0]

    assert judged(MEASUREMENTS)[0] == {None}
    refusals, device = judged(MEASUREMENTS | {index: bytes(48)})
    assert refusals == {None, "policy.measurement_not_allowed"}
    assert device.mismatches == (index,)
    strict = device_rules()
    whole = verify_evidence(AMD.evidence(devices=(GPU.evidence(nonce),)), CHALLENGE, trust)
    found = [one.found for one in strict.judge(whole) if one.refusal]
    assert found == [f"no reference for the {'driver' if version == VBIOS else 'vbios'}"]
