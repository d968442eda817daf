"""What a policy demands of a machine's GPUs and switches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sealring.attest.evidence.policy_rule import Rule, any_of, judged
from sealring.attest.evidence.worker import AttestedDevice, DescribedWorker
from sealring.errors import DeviceNotAllowed, MeasurementNotAllowed


@dataclass(frozen=True, slots=True)
class DeviceRules:
    """What the machine's GPUs and switches must show."""

    gpus: int = 1
    switches: int = 0
    models: frozenset[str] = frozenset()
    firmware: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By name (driver, vbios): the admitted versions, where the policy lists some."""
    require_reference: bool = True


def judge_devices(rules: DeviceRules | None, worker: DescribedWorker) -> list[Rule]:
    if rules is None:
        shown = " ".join(device.model for device in worker.devices)
        return (
            [judged("devices", False, "none: the policy has no [nvidia]", shown, DeviceNotAllowed)]
            if worker.devices
            else []
        )
    gpus = {one.identity for one in worker.devices if not one.is_switch}
    switches = {one.identity for one in worker.devices if one.is_switch}
    results = []
    for name, shown_ones, least in (
        ("gpus", gpus, rules.gpus),
        ("switches", switches, rules.switches),
    ):
        fits, wanted = len(shown_ones) >= least, f"at least {least}"
        results.append(judged(name, fits, wanted, str(len(shown_ones)), DeviceNotAllowed))
    results += _linked(worker, len(gpus))
    for device in worker.devices:
        results += _device(rules, device)
    return results


def _linked(worker: DescribedWorker, gpus: int) -> list[Rule]:
    """From both ends, where switches are shown: these GPUs and switches, and nothing besides.

    GPUs in protected PCIe mode share NVLinks that are not encrypted, so their switches must be
    shown, whatever the policy's count of switches is.
    """
    switches = [one for one in worker.devices if one.is_switch]
    if not switches:
        alone = sorted(one.identity for one in worker.devices if one.protected_pcie)
        said = f"none, for {' '.join(alone)}"
        wanted = "shown with every GPU in protected PCIe mode"
        return [judged("switches of gpus", False, wanted, said, DeviceNotAllowed)] if alone else []
    shown = {one for device in switches for one in device.switches}
    wrong = sorted(
        device.identity
        for device in worker.devices
        if not device.is_switch and set(device.switches) != shown
    )
    ends = {frozenset(device.gpus) for device in switches}
    counts = ", ".join(sorted(str(len(one)) for one in ends))
    return [
        judged(
            "links of gpus", not wrong, "each to all switches shown and no other",
            f"not so: {' '.join(wrong)}" if wrong else "so", DeviceNotAllowed,
        ),
        judged(
            "links of switches", len(ends) == 1 and {len(one) for one in ends} == {gpus},
            f"all to the same {gpus} GPUs", f"{counts} GPUs, {len(ends)} sets of them",
            DeviceNotAllowed,
        ),
    ]  # fmt: skip


def _device(rules: DeviceRules, device: AttestedDevice) -> list[Rule]:
    name = device.identity
    results = []
    if rules.models:
        fits, wanted = device.model in rules.models, any_of(rules.models)
        results.append(judged(f"{name} model", fits, wanted, device.model, DeviceNotAllowed))
    for part, versions in rules.firmware.items():
        has = device.firmware.get(part)
        if has is not None:
            fits, wanted = has in versions, any_of(versions)
            results.append(judged(f"{name} {part}", fits, wanted, has, DeviceNotAllowed))
    said = [f"{' '.join(map(str, device.mismatches))} differ"] if device.mismatches else []
    said += [f"no reference for the {part}" for part in device.unreferenced]
    fits = not device.mismatches and not (device.unreferenced and rules.require_reference)
    wanted = "as NVIDIA's references" if rules.require_reference else "as any reference there is"
    found = "; ".join(said) or "the same"
    results.append(judged(f"{name} measurements", fits, wanted, found, MeasurementNotAllowed))
    return results
