"""What a policy demands, and rule by rule why something may or may not join.

The evidence is true by now; here it is held against what the job's owner wrote down. Every rule is
judged, so that an operator sees all that fails at once. Debug guests have no rule that admits them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from sealring.attest.evidence.worker import AttestedDevice, DescribedWorker
from sealring.errors import (
    AttestationError,
    DebugGuest,
    DeviceNotAllowed,
    GuestNotAllowed,
    JobNotAllowed,
    KindNotAllowed,
    MeasurementNotAllowed,
    RankNotAllowed,
    StaleRevocationList,
    TcbTooOld,
)


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    wanted: str
    found: str
    refusal: type[AttestationError] | None
    """None if it passed."""


def judged(
    name: str, passed: bool, wanted: str, found: str, refusal: type[AttestationError]
) -> Rule:
    return Rule(name, wanted, found, None if passed else refusal)


def any_of(names: Collection[str]) -> str:
    return " or ".join(sorted(names)) or "nothing"


def bits(value: int) -> str:
    """bits 6 9; no bits"""
    found = [str(at) for at in range(value.bit_length()) if value >> at & 1]
    return f"bits {' '.join(found)}" if found else "no bits"


def shown(value: int | None) -> str:
    return "not stated" if value is None else str(value)


_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class ImaRules:
    files: Mapping[str, frozenset[str]]
    """By path, the digests that it may have."""
    exclude: frozenset[str]
    """Paths, and directories with a slash at their end, that are not asked for."""
    violations: bool
    """False: a file that changed while it was measured or in use is refused."""

    digest: str = field(init=False)
    """The same for rules that say the same. A certificate names the rules that it was given by: it
    cannot hold the list of files."""

    def __post_init__(self) -> None:
        text = json.dumps(
            [
                {path: sorted(digests) for path, digests in self.files.items()},
                sorted(self.exclude),
                self.violations,
            ],
            sort_keys=True,
        )
        object.__setattr__(self, "digest", hashlib.sha256(text.encode()).hexdigest())

    def admits(self, path: str, digests: tuple[str, ...]) -> bool:
        if any(path == one or (one.endswith("/") and path.startswith(one)) for one in self.exclude):
            return True
        return set(digests) <= self.files.get(path, frozenset())


def judge_ima(rules: ImaRules | None, worker: DescribedWorker) -> list[Rule]:
    if rules is None:
        return []
    wanted = f"only files of {len(rules.files)} listed"
    if worker.ima_rules:
        # A certificate's word: its broker saw the list, and judged it by rules of this digest.
        same = worker.ima_rules == rules.digest
        found = "judged by the same rules" if same else "judged by other rules"
        return [_judged("ima", same, wanted, found), *_violations(rules, worker)]
    if not worker.ima_entries:
        return [_judged("ima", False, wanted, "no list of measured files")]
    others = [path for path, digests in worker.ima_files.items() if not rules.admits(path, digests)]
    shown = ", ".join(f"{path} ({worker.ima_files[path][-1]})" for path in others[:_SHOWN])
    more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    found = f"{worker.ima_entries} entries, others: {shown or 'none'}{more}"
    return [_judged("ima", not others, wanted, found), *_violations(rules, worker)]


def _violations(rules: ImaRules, worker: DescribedWorker) -> list[Rule]:
    if rules.violations:
        return []
    found = str(worker.ima_violations)
    return [_judged("ima violations", not worker.ima_violations, "none", found)]


def _judged(name: str, passed: bool, wanted: str, found: str) -> Rule:
    return judged(name, passed, wanted, found, MeasurementNotAllowed)


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


@dataclass(frozen=True, slots=True)
class KindRules:
    """What one kind of evidence must show."""

    measurements: frozenset[str] = frozenset()
    signers: frozenset[str] = frozenset()
    products: frozenset[str] = frozenset()
    minimum_tcb: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By product, as each vendor numbers the parts of each. A product without one is refused."""
    launch_tcb: bool = False
    """The guest must have been launched under a TCB that meets the same minimum."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """The most that each fact of the launch may be: vmpl 0, migration 0."""
    masks: Mapping[str, int] = field(default_factory=dict)
    """The bits that each fact of the launch may have set."""
    floors: Mapping[str, int] = field(default_factory=dict)
    """The least that each fact of the launch may be: guest_svn 3."""
    facts: Mapping[str, int] = field(default_factory=dict)
    """What each fact of the launch must be: platform_smt 0."""
    registers: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """What each of these registers must hold: one of the values."""
    events: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """What each of these registers may have been extended with, by a log that replays."""
    ima: ImaRules | None = None
    """Which files may have been measured since boot; None: the policy does without."""
    tcb_status: frozenset[str] = frozenset()
    """The vendor's words on a TCB that are good enough; empty where the vendor gives none."""
    unchecked: frozenset[str] = frozenset()
    """The rules that the policy leaves out and says so."""


@dataclass(frozen=True, slots=True)
class RankRules:
    first: int
    last: int
    kinds: frozenset[str]


@dataclass(frozen=True, slots=True)
class ResourceRules:
    """Who gets one of the broker's data keys."""

    path: str
    ranks: tuple[int, int] | None
    """First and last; None: all."""
    kinds: frozenset[str]
    guests: bool = False
    """Stock KBS clients get it too: attested guests that are no rank of a job."""


@dataclass(frozen=True, slots=True)
class Policy:
    kinds: Mapping[str, KindRules]
    ranks: tuple[RankRules, ...] = ()
    """Empty: any rank may be any admitted kind. Otherwise a rank must be in one of them."""
    simulated_roots: frozenset[str] = frozenset()
    tpm_roots: frozenset[str] = frozenset()
    devices: DeviceRules | None = None
    """None: a worker shows no devices."""
    nonce_seconds: int = 120
    require_revocation_lists: bool = True
    issuers_without_lists: frozenset[str] = frozenset()
    """Names of issuers that are believed although nothing is known of what they revoked."""
    revocation_list_days: int = 30
    rejoins: int = 0
    job: str | None = None
    """The only job that may be joined; None: any."""
    certificate_minutes: float = 10
    """How long a worker's certificate lives, and so how long a revoked worker may stay."""
    peer_evidence: bool = False
    """Workers show each other the evidence itself, not only the broker's word on it."""
    resources: tuple[ResourceRules, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    label: str
    rules: tuple[Rule, ...]

    @property
    def admitted(self) -> bool:
        return all(rule.refusal is None for rule in self.rules)

    def require(self) -> None:
        """Raise the first refusal, with all of them in its message."""
        failed = [rule for rule in self.rules if rule.refusal is not None]
        if failed and failed[0].refusal is not None:
            said = "; ".join(f"{one.name}: {one.found}, not {one.wanted}" for one in failed)
            raise failed[0].refusal(f"the policy does not admit this {self.label} worker: {said}")


def judge(
    policy: Policy, worker: DescribedWorker, rank: int | None, job: str | None = None
) -> Verdict:
    """`rank` and `job` are None where none is asked for yet, as in `sealring policy check`."""
    rules = policy.kinds.get(worker.kind)
    results = [
        judged("kind", rules is not None, any_of(policy.kinds), worker.label, KindNotAllowed),
        judged("debug", not worker.debug, "off", "on" if worker.debug else "off", DebugGuest),
    ]
    if rules is not None:
        results += [*_runs(rules, worker), *judge_ima(rules.ima, worker), *_launch(rules, worker)]
    results += judge_devices(policy.devices, worker)
    if rank is not None:
        results.append(_rank(policy, worker.kind, rank))
    if job is not None and policy.job is not None:
        results.append(judged("job", job == policy.job, policy.job, job, JobNotAllowed))
    results.append(_lists(policy, worker))
    return Verdict(worker.label, tuple(results))


def granted(policy: Policy, kind: str, rank: int) -> list[str]:
    """The resources that a worker of this kind may have as this rank."""
    return [
        one.path
        for one in policy.resources
        if kind in one.kinds and (one.ranks is None or one.ranks[0] <= rank <= one.ranks[1])
    ]


def granted_to_guests(policy: Policy, kind: str) -> list[str]:
    """The resources that an attested guest of this kind may have without being a rank."""
    return [one.path for one in policy.resources if one.guests and kind in one.kinds]


def _runs(rules: KindRules, worker: DescribedWorker) -> list[Rule]:
    results = []
    if rules.measurements or rules.signers:
        known = worker.measurement in rules.measurements or worker.signer in rules.signers
        wanted = f"one of {len(rules.measurements)} measurements or {len(rules.signers)} signers"
        found = worker.measurement
        results.append(judged("measurement", known, wanted, found, MeasurementNotAllowed))
    for name, values in rules.registers.items():
        has = worker.registers.get(name, "not quoted")
        wanted = f"one of {len(values)} values"
        results.append(judged(name, has in values, wanted, has, MeasurementNotAllowed))
    for name, allowed in rules.events.items():
        digests = worker.events.get(name)
        others = [one for one in digests or () if one not in allowed]
        found = (
            "no log" if digests is None else f"{len(digests)}, others: {' '.join(others) or 'none'}"
        )
        passed = digests is not None and not others
        wanted = f"only events of {len(allowed)} listed"
        results.append(judged(f"{name} events", passed, wanted, found, MeasurementNotAllowed))
    return results


def _launch(rules: KindRules, worker: DescribedWorker) -> list[Rule]:
    results = []
    if rules.products:
        fits = worker.product in rules.products
        wanted = any_of(rules.products)
        results.append(judged("product", fits, wanted, worker.product, GuestNotAllowed))
    results += _tcb(rules, worker)
    if rules.tcb_status:
        fits, wanted = worker.tcb_status in rules.tcb_status, any_of(rules.tcb_status)
        found = " ".join((worker.tcb_status, *worker.advisories))
        results.append(judged("tcb status", fits, wanted, found, TcbTooOld))
    for name, most in rules.limits.items():
        has = worker.guest.get(name)
        fits = has is not None and has <= most
        results.append(judged(name, fits, f"at most {most}", shown(has), GuestNotAllowed))
    for name, mask in rules.masks.items():
        has = worker.guest.get(name)
        fits = has is not None and not has & ~mask
        found = shown(has) if has is None else bits(has)
        results.append(judged(name, fits, f"at most {bits(mask)}", found, GuestNotAllowed))
    for name, least in rules.floors.items():
        has = worker.guest.get(name)
        fits = has is not None and has >= least
        results.append(judged(name, fits, f"at least {least}", shown(has), GuestNotAllowed))
    for name, value in rules.facts.items():
        has = worker.guest.get(name)
        results.append(judged(name, has == value, str(value), shown(has), GuestNotAllowed))
    return results


def _tcb(rules: KindRules, worker: DescribedWorker) -> list[Rule]:
    if not rules.minimum_tcb:
        return []
    minimum = rules.minimum_tcb.get(worker.product)
    if minimum is None:
        wanted = f"{any_of(rules.minimum_tcb)}: no minimum is stated for others"
        return [judged("tcb", False, wanted, worker.product, TcbTooOld)]
    found = {"tcb": worker.tcb} | ({"launch tcb": worker.launch_tcb} if rules.launch_tcb else {})
    results = []
    for which, parts in found.items():
        for name, least in minimum.items():
            has = parts.get(name)
            fits = has is not None and has >= least
            results.append(
                judged(f"{which} {name}", fits, f"at least {least}", shown(has), TcbTooOld)
            )
    return results


def _rank(policy: Policy, kind: str, rank: int) -> Rule:
    fitting = [one for one in policy.ranks if one.first <= rank <= one.last]
    kinds = set().union(*(one.kinds for one in fitting)) if policy.ranks else set(policy.kinds)
    return judged(f"rank {rank}", kind in kinds, any_of(kinds), kind, RankNotAllowed)


def _lists(policy: Policy, worker: DescribedWorker) -> Rule:
    """Nothing that an issuer may have revoked. Simulated evidence has no vendor, and so no list."""
    own = [] if worker.simulated else [(worker.lists, worker.unlisted)]
    chains = [*own, *((device.lists, device.unlisted) for device in worker.devices)]
    ages = [(worker.verified_at - one.made).days for lists, _ in chains for one in lists]
    missing = {issuer for _, unlisted in chains for issuer in unlisted}
    missing -= policy.issuers_without_lists
    found = f"{len(ages)} lists, the oldest of {max(ages)} days" if ages else "no list"
    if missing:
        found += f"; none of {', '.join(sorted(missing))}"
    fresh = all(age <= policy.revocation_list_days for age in ages)
    needed = policy.require_revocation_lists
    whose = "one of every issuer" if needed else "any"
    wanted = f"{whose}, of at most {policy.revocation_list_days} days"
    return judged(
        "revocation", fresh and not (needed and missing), wanted, found, StaleRevocationList
    )
