"""What may join, and rule by rule why something may or may not.

The evidence is true by now; here it is held against what the job's owner wrote down. Every rule is
judged, so that an operator sees all that fails at once. Debug guests have no rule that admits them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sealring.attest.evidence.policy_devices import DeviceRules, judge_devices
from sealring.attest.evidence.policy_ima import ImaRules, judge_ima
from sealring.attest.evidence.policy_rule import Rule, any_of, bits, judged, shown
from sealring.attest.evidence.worker import DescribedWorker
from sealring.errors import (
    DebugGuest,
    GuestNotAllowed,
    JobNotAllowed,
    KindNotAllowed,
    MeasurementNotAllowed,
    RankNotAllowed,
    StaleRevocationList,
    TcbTooOld,
)


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
