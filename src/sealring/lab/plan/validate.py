"""Predicted against measured, for every case of a bench run; none is left out."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from typing import Any

from sealring.core.schedule import Operation
from sealring.errors import ConfigurationError
from sealring.lab.plan.fit import profile_of, setting_of, turns_from
from sealring.lab.plan.layouts import (
    DEFAULT_CAP_MB,
    ITEMSIZE,
    Compute,
    alone,
    buckets_of,
    compute_of,
    ddp_step,
)
from sealring.lab.plan.models import load_model
from sealring.lab.plan.profiles import WAYS, Profile, Way
from sealring.lab.results import Results, StepCase, median_of, spread_of


@dataclass(frozen=True, slots=True)
class Compared:
    kind: str
    """`step` or `all_reduce`."""
    what: str
    variant: str
    ranks: int
    bucket_mb: float
    """0 for a collective."""
    bytes: int
    """Of the gradients, or of the collective's tensor."""
    measured_s: float
    spread: float
    predicted_s: float
    seen: bool
    """The profile was fitted to this very case, so it says nothing about prediction."""

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "error": self.error}


@dataclass(frozen=True, slots=True)
class Validation:
    profile: Profile
    cases: list[Compared]

    def median_error(self, kind: str) -> float | None:
        errors = [abs(case.error) for case in self.cases if case.kind == kind and not case.seen]
        return statistics.median(errors) if errors else None

    def as_json(self) -> dict[str, Any]:
        return {
            "median_error": {kind: self.median_error(kind) for kind in ("step", "all_reduce")},
            "cases": [case.as_json() for case in self.cases],
            "profile": dataclasses.asdict(self.profile),
        }


def validate(results: Results) -> Validation:
    profile = profile_of(results)
    cases = [*_steps(results, profile), *_all_reduces(results, profile)]
    if not cases:
        raise ConfigurationError(
            "these results have no steps and no all-reduces to compare with: measure with "
            "`sealring bench all`"
        )
    return Validation(profile, cases)


def _steps(results: Results, profile: Profile) -> list[Compared]:
    found = []
    for case in results.step:
        way = _way(profile, case.variant)
        if way is None or case.device != "cpu" or case.ranks < 2:
            continue
        model = load_model(case.model)
        compute = computing(
            results, case.model, case.batch, case.precision, case.ranks, case.run
        ) or compute_of(model, profile, case.ranks, case.batch, case.precision)
        cap = None if case.bucket_cap_mb == DEFAULT_CAP_MB else case.bucket_cap_mb
        buckets = buckets_of(model, cap, ITEMSIZE[case.precision])
        if cap is None and case.all_reduces != len(buckets):
            # torch tells its default from a 25 that was given; the count tells which it was.
            buckets = buckets_of(model, case.bucket_cap_mb, ITEMSIZE[case.precision])
        setting = setting_of(results, profile, way, case.ranks, case.transport)
        step = ddp_step(setting, compute, buckets)
        found.append(
            Compared(
                "step",
                f"{case.model}, {case.batch} x {case.precision}",
                case.variant,
                case.ranks,
                case.bucket_cap_mb,
                sum(bucket.bytes for bucket in buckets),
                median_of(case.seconds),
                spread_of(case.seconds),
                step.seconds,
                seen=False,
            )
        )
    return found


def computing(
    results: Results,
    model: str,
    batch: int,
    precision: str,
    ranks: int,
    run: int | None = None,
    device: str = "cpu",
) -> Compute | None:
    """A step without communication by so many ranks at once: as measured, in the same run if there
    it was; else from one rank's and the cores there are; None if neither was measured."""
    alike = [
        case
        for case in results.step
        if case.variant == "compute"
        and (case.model, case.batch, case.precision) == (model, batch, precision)
        and case.device == device
    ]
    machine = results.machine
    cores = machine.cores if device == "cpu" else max(1, machine.gpus.count(device))
    crowded = [case for case in alike if case.ranks == ranks]
    # A machine that others use is slower at times: what was alternated met the same times.
    crowded.sort(key=lambda case: case.run != run)
    if crowded:
        return _split(crowded[0], 1.0)
    for case in alike:
        if case.ranks == 1:
            return _split(case, max(1.0, ranks / cores))
    return None


def _split(case: StepCase, crowd: float) -> Compute:
    """The recorded parts, in the proportion in which they fill the median step."""
    parts = {part.name: part.exposed_s + part.hidden_s for part in case.split}
    forward, backward = parts.get("forward", 1.0), parts.get("backward", 2.0)
    optimizer = parts.get("optimizer", 0.0)
    scale = median_of(case.seconds) * crowd / (forward + backward + optimizer)
    return Compute(forward * scale, backward * scale, optimizer * scale)


def _all_reduces(results: Results, profile: Profile) -> list[Compared]:
    found = []
    learnt = [id(case) for way in profile.ways() for case in turns_from(results, way)]
    for case in [*results.allreduce, *results.collectives]:
        way = _way(profile, case.variant)
        if way is None or case.collective != "all_reduce" or case.device != "cpu":
            continue
        setting = setting_of(results, profile, way, case.ranks, case.transport)
        found.append(
            Compared(
                "all_reduce",
                case.transport,
                case.variant,
                case.ranks,
                0.0,
                case.bytes,
                median_of(case.seconds),
                spread_of(case.seconds),
                alone(setting, Operation.ALL_REDUCE, case.bytes),
                seen=case.ranks == 2 or id(case) in learnt,
            )
        )
    return found


def _way(profile: Profile, variant: str) -> Way | None:
    for way in WAYS:
        if way == variant and profile.way(way) is not None:
            return way
    return None
