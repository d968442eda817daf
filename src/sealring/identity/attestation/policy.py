"""What may join, and rule by rule why something may or may not.

The evidence is true by now; here it is held against what the job's owner wrote down. Every rule is
judged, so that an operator sees all that fails at once. Debug guests have no rule that admits them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
from sealring.identity.attestation.worker import AttestedDevice, DescribedWorker


@dataclass(frozen=True, slots=True)
class KindRules:
    """What one kind of evidence must show."""

    measurements: frozenset[str] = frozenset()
    signers: frozenset[str] = frozenset()
    products: frozenset[str] = frozenset()
    minimum_tcb: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    """The most that each fact of the launch may be: vmpl 0, migration 0."""
    registers: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """What each of these registers must hold: one of the values."""
    events: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """What each of these registers may have been extended with, by a log that replays."""
    tcb_status: frozenset[str] = frozenset()
    """The vendor's words on a TCB that are good enough; empty where the vendor gives none."""


@dataclass(frozen=True, slots=True)
class DeviceRules:
    """What the machine's GPUs and switches must show."""

    gpus: int = 1
    switches: int = 0
    models: frozenset[str] = frozenset()
    firmware: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By name (driver, vbios): the admitted versions, where the policy lists some."""
    require_reference: bool = True


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
class Rule:
    name: str
    wanted: str
    found: str
    refusal: type[AttestationError] | None
    """None if it passed."""


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
        _rule("kind", rules is not None, _any(policy.kinds), worker.label, KindNotAllowed),
        _rule("debug", not worker.debug, "off", "on" if worker.debug else "off", DebugGuest),
    ]
    if rules is not None:
        results += [*_runs(rules, worker), *_launch(rules, worker)]
    results += judge_devices(policy.devices, worker)
    if rank is not None:
        results.append(_rank(policy, worker.kind, rank))
    if job is not None and policy.job is not None:
        results.append(_rule("job", job == policy.job, policy.job, job, JobNotAllowed))
    results.append(_lists(policy, worker))
    return Verdict(worker.label, tuple(results))


def granted(policy: Policy, kind: str, rank: int) -> list[str]:
    """The resources that a worker of this kind may have as this rank."""
    return [
        one.path
        for one in policy.resources
        if kind in one.kinds and (one.ranks is None or one.ranks[0] <= rank <= one.ranks[1])
    ]


def _runs(rules: KindRules, worker: DescribedWorker) -> list[Rule]:
    results = []
    if rules.measurements or rules.signers:
        known = worker.measurement in rules.measurements or worker.signer in rules.signers
        wanted = f"one of {len(rules.measurements)} measurements or {len(rules.signers)} signers"
        found = worker.measurement
        results.append(_rule("measurement", known, wanted, found, MeasurementNotAllowed))
    for name, values in rules.registers.items():
        has = worker.registers.get(name, "not quoted")
        wanted = f"one of {len(values)} values"
        results.append(_rule(name, has in values, wanted, has, MeasurementNotAllowed))
    for name, allowed in rules.events.items():
        digests = worker.events.get(name)
        others = [one for one in digests or () if one not in allowed]
        found = (
            "no log" if digests is None else f"{len(digests)}, others: {' '.join(others) or 'none'}"
        )
        passed = digests is not None and not others
        wanted = f"only events of {len(allowed)} listed"
        results.append(_rule(f"{name} events", passed, wanted, found, MeasurementNotAllowed))
    return results


def _launch(rules: KindRules, worker: DescribedWorker) -> list[Rule]:
    results = []
    if rules.products:
        fits = worker.product in rules.products
        wanted = _any(rules.products)
        results.append(_rule("product", fits, wanted, worker.product, GuestNotAllowed))
    for name, least in rules.minimum_tcb.items():
        has = worker.tcb.get(name)
        fits = has is not None and has >= least
        results.append(_rule(f"tcb {name}", fits, f"at least {least}", _shown(has), TcbTooOld))
    if rules.tcb_status:
        fits, wanted = worker.tcb_status in rules.tcb_status, _any(rules.tcb_status)
        found = " ".join((worker.tcb_status, *worker.advisories))
        results.append(_rule("tcb status", fits, wanted, found, TcbTooOld))
    for name, most in rules.limits.items():
        has = worker.guest.get(name)
        fits = has is not None and has <= most
        results.append(_rule(name, fits, f"at most {most}", _shown(has), GuestNotAllowed))
    return results


def _rank(policy: Policy, kind: str, rank: int) -> Rule:
    fitting = [one for one in policy.ranks if one.first <= rank <= one.last]
    kinds = set().union(*(one.kinds for one in fitting)) if policy.ranks else set(policy.kinds)
    return _rule(f"rank {rank}", kind in kinds, _any(kinds), kind, RankNotAllowed)


def _lists(policy: Policy, worker: DescribedWorker) -> Rule:
    """Every chain needs a list of its own. Simulated evidence has no vendor, and so no list."""
    own = [] if worker.simulated else [worker.lists]
    chains = [*own, *(device.lists for device in worker.devices)]
    ages = [(worker.verified_at - one.made).days for lists in chains for one in lists]
    without = sum(not lists for lists in chains)
    found = f"{len(ages)} lists, the oldest of {max(ages)} days" if ages else "no list"
    if ages and without:
        found += f"; {without} chains without one"
    fresh = all(age <= policy.revocation_list_days for age in ages)
    needed = policy.require_revocation_lists and bool(chains)
    wanted = f"{'some' if needed else 'any'}, of at most {policy.revocation_list_days} days"
    return _rule(
        "revocation", fresh and not (needed and without), wanted, found, StaleRevocationList
    )


def judge_devices(rules: DeviceRules | None, worker: DescribedWorker) -> list[Rule]:
    if rules is None:
        shown = " ".join(device.model for device in worker.devices)
        return (
            [_rule("devices", False, "none: the policy has no [nvidia]", shown, DeviceNotAllowed)]
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
        results.append(_rule(name, fits, wanted, str(len(shown_ones)), DeviceNotAllowed))
    results.append(_linked(worker))
    for device in worker.devices:
        results += _device(rules, device)
    return results


def _linked(worker: DescribedWorker) -> Rule:
    """Each GPU is linked to just the switches that are shown, where any are: none of elsewhere."""
    shown = {one for device in worker.devices if device.is_switch for one in device.switches}
    linked = {one for device in worker.devices if not device.is_switch for one in device.switches}
    foreign = sorted(linked - shown) if shown else []
    return _rule(
        "links", not foreign, "to the switches shown", " ".join(foreign) or "no others",
        DeviceNotAllowed,
    )  # fmt: skip


def _device(rules: DeviceRules, device: AttestedDevice) -> list[Rule]:
    name = device.identity
    results = []
    if rules.models:
        fits, wanted = device.model in rules.models, _any(rules.models)
        results.append(_rule(f"{name} model", fits, wanted, device.model, DeviceNotAllowed))
    for part, versions in rules.firmware.items():
        has = device.firmware.get(part)
        if has is not None:
            fits, wanted = has in versions, _any(versions)
            results.append(_rule(f"{name} {part}", fits, wanted, has, DeviceNotAllowed))
    differing = " ".join(map(str, device.mismatches))
    found = (
        f"{differing} differ" if differing else "the same" if device.reference else "no reference"
    )
    fits = not device.mismatches and (bool(device.reference) or not rules.require_reference)
    wanted = "as NVIDIA's references" if rules.require_reference else "as any reference there is"
    results.append(_rule(f"{name} measurements", fits, wanted, found, MeasurementNotAllowed))
    return results


def _rule(
    name: str, passed: bool, wanted: str, found: str, refusal: type[AttestationError]
) -> Rule:
    return Rule(name, wanted, found, None if passed else refusal)


def _any(names: Mapping[str, object] | frozenset[str] | set[str]) -> str:
    return " or ".join(sorted(names)) or "nothing"


def _shown(value: int | None) -> str:
    return "not stated" if value is None else str(value)
