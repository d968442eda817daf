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
    GuestNotAllowed,
    JobNotAllowed,
    KindNotAllowed,
    MeasurementNotAllowed,
    RankNotAllowed,
    StaleRevocationList,
    TcbTooOld,
)
from sealring.identity.attestation.worker import Described


@dataclass(frozen=True, slots=True)
class KindRules:
    """What one kind of evidence must show."""

    measurements: frozenset[str] = frozenset()
    signers: frozenset[str] = frozenset()
    products: frozenset[str] = frozenset()
    minimum_tcb: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    """The most that each fact of the launch may be: vmpl 0, migration 0."""


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
    nonce_seconds: int = 120
    require_revocation_lists: bool = True
    revocation_list_days: int = 30
    rejoins: int = 0
    job: str | None = None
    """The only job that may be joined; None: any."""
    certificate_minutes: int = 10
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


def judge(policy: Policy, worker: Described, rank: int | None, job: str | None = None) -> Verdict:
    """`rank` and `job` are None where none is asked for yet, as in `sealring policy check`."""
    rules = policy.kinds.get(worker.kind)
    results = [
        _rule("kind", rules is not None, _any(policy.kinds), worker.label, KindNotAllowed),
        _rule("debug", not worker.debug, "off", "on" if worker.debug else "off", DebugGuest),
    ]
    if rules is not None:
        results += [_runs(rules, worker), *_launch(rules, worker)]
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


def _runs(rules: KindRules, worker: Described) -> Rule:
    known = worker.measurement in rules.measurements or worker.signer in rules.signers
    wanted = f"one of {len(rules.measurements)} measurements or {len(rules.signers)} signers"
    return _rule("measurement", known, wanted, worker.measurement, MeasurementNotAllowed)


def _launch(rules: KindRules, worker: Described) -> list[Rule]:
    results = []
    if rules.products:
        fits = worker.product in rules.products
        wanted = _any(rules.products)
        results.append(_rule("product", fits, wanted, worker.product, GuestNotAllowed))
    for name, least in rules.minimum_tcb.items():
        has = worker.tcb.get(name)
        fits = has is not None and has >= least
        results.append(_rule(f"tcb {name}", fits, f"at least {least}", _shown(has), TcbTooOld))
    for name, most in rules.limits.items():
        has = worker.guest.get(name)
        fits = has is not None and has <= most
        results.append(_rule(name, fits, f"at most {most}", _shown(has), GuestNotAllowed))
    return results


def _rank(policy: Policy, kind: str, rank: int) -> Rule:
    fitting = [one for one in policy.ranks if one.first <= rank <= one.last]
    kinds = set().union(*(one.kinds for one in fitting)) if policy.ranks else set(policy.kinds)
    return _rule(f"rank {rank}", kind in kinds, _any(kinds), kind, RankNotAllowed)


def _lists(policy: Policy, worker: Described) -> Rule:
    """Simulated evidence has no vendor, and so no list."""
    ages = [(worker.verified_at - one.made).days for one in worker.lists]
    found = f"{len(ages)} lists, the oldest of {max(ages)} days" if ages else "no list"
    fresh = all(age <= policy.revocation_list_days for age in ages)
    needed = policy.require_revocation_lists and not worker.simulated
    wanted = f"{'some' if needed else 'any'}, of at most {policy.revocation_list_days} days"
    return _rule(
        "revocation", fresh and (bool(ages) or not needed), wanted, found, StaleRevocationList
    )


def _rule(
    name: str, passed: bool, wanted: str, found: str, refusal: type[AttestationError]
) -> Rule:
    return Rule(name, wanted, found, None if passed else refusal)


def _any(names: Mapping[str, object] | frozenset[str] | set[str]) -> str:
    return " or ".join(sorted(names)) or "nothing"


def _shown(value: int | None) -> str:
    return "not stated" if value is None else str(value)
