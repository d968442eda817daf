"""Compares predictions with every case of a bench run, and with published results of others."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from sealring.core.schedule import Operation
from sealring.errors import ConfigurationError
from sealring.lab.bench.harness import BenchRow
from sealring.lab.plan.answer import CAPS_MB, Question, reckoned
from sealring.lab.plan.collectives import Cluster
from sealring.lab.plan.fit import profile_of, setting_of, turns_from
from sealring.lab.plan.layouts import (
    DEFAULT_CAP_MB,
    ITEMSIZE,
    ClusterSetting,
    Compute,
    alone,
    buckets_of,
    compute_of,
    ddp_step,
)
from sealring.lab.plan.models import load_model
from sealring.lab.plan.profiles import WAYS, Profile, Way, load_network, load_profile
from sealring.lab.results import Results, StepCase, spread_of


@dataclass(frozen=True, slots=True)
class Compared:
    kind: str
    """`step` or `all_reduce`."""
    what: str
    variant: str
    ranks: int
    bucket_mb: float
    """The bucket size; 0 for a collective."""
    bytes: int
    """The bytes of the gradients, or of the collective's tensor."""
    measured_s: float
    spread: float
    predicted_s: float
    seen: bool
    """Whether the profile was fitted to this case, which then does not count as a prediction."""

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
        return median(errors) if errors else None

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
            # Torch's default differs from an explicit 25; the count shows which it was.
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
                median(case.seconds),
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
    """The step without communication by `ranks` ranks at once, as measured, if possible in the same
    run. Else it is computed from one rank's step and the number of cores; None if neither was
    measured."""
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
    # A shared machine is slower at times; variants of one run were measured at the same time.
    crowded.sort(key=lambda case: case.run != run)
    if crowded:
        return _split(crowded[0], 1.0)
    for case in alike:
        if case.ranks == 1:
            return _split(case, max(1.0, ranks / cores))
    return None


def _split(case: StepCase, crowd: float) -> Compute:
    """The recorded parts, scaled to the median step."""
    parts = {part.name: part.exposed_s + part.hidden_s for part in case.split}
    forward, backward = parts.get("forward", 1.0), parts.get("backward", 2.0)
    optimizer = parts.get("optimizer", 0.0)
    scale = median(case.seconds) * crowd / (forward + backward + optimizer)
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
                median(case.seconds),
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


# ---- predictions, from a profile of published figures, for published experiments
#
# Nothing is fitted to the results that are compared. A difference shows which of the published
# micro-benchmarks cannot be true for the machine of that experiment.


EXPERIMENTS: Final = ("2501.11771",)
PAPER: Final = {"25": 41.6, "best": 3.03}
"""The published slowdowns of GPT-2-XL on four GPU-TEEs (arXiv 2501.11771v3, abstract)."""


def reproduce(experiment: str) -> list[BenchRow]:
    """Returns predictions beside published figures, and the costs of a message and of a byte by
    which both published figures would be true: T = message x messages + bytes / rate."""
    if experiment not in EXPERIMENTS:
        raise ConfigurationError(f"known experiments: {', '.join(EXPERIMENTS)}, not {experiment!r}")
    profile, model = load_profile("h100-cc"), load_model("gpt2-xl")
    network = load_network(profile.network)
    question = Question(model, profile, network, 4, 4, model.batch, "fp32")
    compute, size = reckoned(question), ITEMSIZE["fp32"]
    cluster = Cluster(4, 4)

    def seconds(way: Way, cap: float | None) -> float:
        buckets = buckets_of(model, cap, size)
        return ddp_step(ClusterSetting(profile, way, network, cluster), compute, buckets).seconds

    caps: list[float | None] = [None, *CAPS_MB]
    best = min(caps, key=lambda cap: seconds("cc", cap))
    # The paper compares with DDP as it is without protection: its default buckets.
    plain = seconds("plain", None)
    rows = [BenchRow("step", "plain step", plain * 1e3, "ms")]
    messages = []
    for case, cap in (("25", None), ("best", best)):
        count = len(buckets_of(model, cap, size))
        messages.append(count * 2 * (cluster.ranks - 1))
        rows += [
            BenchRow(case, f"{count} all-reduces: predicted", seconds("cc", cap) / plain, "x"),
            BenchRow(case, f"{count} all-reduces: published", PAPER[case], "x"),
            BenchRow(case, f"{count} all-reduces: sealring", seconds("sealed", cap) / plain, "x"),
            BenchRow(case, f"{count} all-reduces: messages a rank", messages[-1], ""),
        ]
    sent = 2 * (cluster.ranks - 1) / cluster.ranks * model.count * size
    route = profile.cc
    assert route is not None
    message = (PAPER["25"] - PAPER["best"]) * plain / (messages[0] - messages[1])
    per_byte = max(1e-15, (PAPER["best"] - 1) * plain - message * messages[1]) / sent
    each = 1 / (1 / route.seal_bytes_per_s.value + 1 / route.open_bytes_per_s.value)
    copies = route.send_s.value + route.receive_s.value
    return [
        *rows,
        BenchRow("cost", "sent by a rank", sent / 1e9, "GB"),
        BenchRow("cost", "a message, for both to be true", message * 1e3, "ms"),
        BenchRow("cost", "a message, by the profile", copies * 1e3, "ms"),
        BenchRow("cost", "bytes, for both to be true", 1e-9 / per_byte, "GB/s"),
        BenchRow("cost", "bytes, by the profile", each / 1e9, "GB/s"),
    ]
