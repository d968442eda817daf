"""Questions to the planner and its answers; `sealring.tune(model)` asks for DDP.

To form a job, ranks make links along a tree, and every member verifies every other:

    T = shared (rank + members * member) + latency * messages + bytes / network

A rank's own work is proportional to the number of members. The messages of a round go up and down
the tree; on the way down, a rank sends all statements to each of its children in turn.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Literal

from sealring import limits
from sealring.core.schedule import Algorithm, Operation
from sealring.errors import ConfigurationError
from sealring.formats.strict import strictly
from sealring.lab.plan.collectives import Cluster
from sealring.lab.plan.layouts import (
    DEFAULT_CAP_MB,
    ITEMSIZE,
    ClusterSetting,
    Compute,
    Memory,
    PlannedStep,
    Precision,
    buckets_of,
    compute_of,
    ddp_memory,
    ddp_step,
    fsdp_memory,
    fsdp_step,
    fsdp_units,
    sharded_memory,
    tensor_pipeline_step,
)
from sealring.lab.plan.models import Model, from_module
from sealring.lab.plan.profiles import (
    Device,
    Figure,
    Network,
    Profile,
    Way,
    load_network,
    load_profile,
    parse_toml,
)
from sealring.lab.results import ScaleCase

_ROUNDS: Final = 3
_MESSAGES_OF_A_LINK: Final = 10
"""The messages to make a link, one after the other: TCP, TLS, hellos, transport."""
_FEWEST: Final = 3
"""A line is fitted only if at least this many numbers of ranks were measured."""


@dataclass(frozen=True, slots=True)
class Forming:
    rank_s: Figure
    """The CPU seconds of a rank for the links of the tree and all else that does not grow."""
    member_s: Figure
    """The CPU seconds of a rank for each member."""
    member_bytes: Figure
    """The bytes of a member's statement, signature and confirmation."""


@cache
def shipped() -> Forming:
    """The default figures, for machines on which forming groups was not measured (`bench all`)."""
    name = "forming.toml"
    text = files("sealring.lab.plan").joinpath("figures", name).read_text()
    return strictly(Forming, parse_toml(text, name), name, "profile")


def forming_of(cases: Sequence[ScaleCase], source: str) -> Forming | None:
    """Fits the figures to the measured groups of all ranks; None if too few were measured."""
    worlds = [case for case in cases if case.what == "world" and case.ranks > 8]
    if len({case.ranks for case in worlds}) < _FEWEST:
        return None
    ranks = [float(case.ranks) for case in worlds]
    line = statistics.linear_regression(ranks, [case.cpu_seconds_per_rank for case in worlds])
    if line.slope <= 0:
        return None
    return Forming(
        Figure(max(0.0, line.intercept), source),
        Figure(line.slope, source),
        shipped().member_bytes,
    )


def forming_seconds(
    forming: Forming, ranks: int, cluster: Cluster, device: Device, network: Network
) -> float:
    """The seconds from the arrival of all ranks until the group exists on all of them."""
    if ranks < 2:
        return 0.0
    depth = (ranks - 1).bit_length()
    # A rank with a GPU has at least one core for itself.
    shared = cluster.per_host / device.cores_per_host.value if device.kind == "cpu" else 1.0
    working = max(1.0, shared) * (forming.rank_s.value + ranks * forming.member_s.value)
    waiting = network.latency_s.value * (2 * _ROUNDS * depth + _MESSAGES_OF_A_LINK)
    sent = ranks * forming.member_bytes.value * depth * (depth + 1) / 2
    between = cluster.hosts > 1
    return working + (waiting + sent / network.bytes_per_s.value if between else 0.0)


# ---- questions and answers


@dataclass(frozen=True, slots=True)
class Question:
    model: Model
    profile: Profile
    network: Network
    ranks: int
    per_host: int
    batch: int
    precision: Precision
    price: float | None = None
    """The price per GPU (or rank) and hour."""
    compute: Compute | None = None
    """The measured computing times; None: computed from the arithmetic."""
    forming: Forming | None = None
    """The measured figures of forming; None: the default figures."""

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.ranks, min(self.per_host, self.ranks))


@dataclass(frozen=True, slots=True)
class WayAnswer:
    way: Way
    layout: str
    seconds: float
    against_plain: float
    compute_s: float
    communicating_s: float
    exposed_s: float
    bucket_mb: float | None
    """The bucket size; None if there are no buckets."""
    default_buckets: bool
    """Whether these are DDP's default buckets: 25 MB, but 1 MiB for the first."""
    all_reduces: int
    algorithm: str
    default_bucket_seconds: float | None
    """The seconds with torch's default buckets; None if there are no buckets."""
    samples_per_s: float
    cost_per_million_samples: float | None


@dataclass(frozen=True, slots=True)
class LayoutAnswer:
    layout: str
    device_bytes: float
    fits: bool
    seconds: dict[str, float]
    """The seconds of a step for each way."""
    memory: Memory


@dataclass(frozen=True, slots=True)
class BucketAnswer:
    bucket_mb: float
    default: bool
    """Whether this is DDP without a bucket_cap_mb, whose first bucket is 1 MiB."""
    all_reduces: int
    seconds: dict[str, float]
    """The seconds of a step for each way."""


@dataclass(frozen=True, slots=True)
class SizeAnswer:
    bytes: int
    algorithm: str
    """The fastest algorithm for a sealed all-reduce of this size."""
    seconds: float
    by_default: str
    default_seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    model: str
    parameters: int
    profile: str
    network: str
    ranks: int
    hosts: int
    batch: int
    precision: Precision
    layout: str
    why: str
    ways: list[WayAnswer]
    layouts: list[LayoutAnswer]
    buckets: list[BucketAnswer]
    """The answers for all bucket sizes that were tried."""
    algorithms: list[SizeAnswer]
    cost_per_day: float | None
    forming_s: float
    """The seconds until the sealed group of all ranks exists."""

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


# ---- answering a question


CAPS_MB: Final = (1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0, 400.0, 800.0, 1600.0, 3200.0, 6400.0)
_SIZES: Final = tuple(4096 << shift for shift in range(0, 19, 2))


def answer(question: Question) -> Answer:
    check(question)
    compute = question.compute or reckoned(question)
    layouts = list(_layouts(question, compute))
    fitting = [each for each in layouts if each.fits]
    if not fitting:
        raise ConfigurationError(_too_large(question, layouts))
    tried = _buckets_tried(question, compute) if layouts[0].fits else []
    if tried:
        fastest = {
            way: min(bucket.seconds[way] for bucket, _ in tried) for way in tried[0][0].seconds
        }
        fitting[0] = layouts[0] = dataclasses.replace(layouts[0], seconds=fastest)
    best = _best_layout(fitting)
    ways = _ways(question, compute, best, tried)
    return Answer(
        model=question.model.name,
        parameters=question.model.count,
        profile=question.profile.name,
        network=question.network.name,
        ranks=question.ranks,
        hosts=question.cluster.hosts,
        batch=question.batch,
        precision=question.precision,
        layout=best.layout,
        why=_why(question, layouts, best),
        ways=ways,
        layouts=layouts,
        buckets=[bucket for bucket, _ in tried],
        algorithms=_algorithms(question),
        cost_per_day=None if question.price is None else question.price * question.ranks * 24,
        forming_s=forming_seconds(
            question.forming or shipped(),
            question.ranks,
            question.cluster,
            question.profile.device,
            question.network,
        ),
    )


def check(question: Question) -> None:
    if not 1 <= question.ranks <= limits.MAX_WORLD:
        raise ConfigurationError(
            f"{question.ranks} ranks: a job has 1 to {limits.MAX_WORLD} of them"
        )
    if question.per_host < 1 or question.batch < 1:
        raise ConfigurationError("--per-host and --batch are 1 or more")
    if question.price is not None and not 0 <= question.price < 1e9:
        raise ConfigurationError(f"a price of {question.price} per hour is none; write --price 2.5")


def reckoned(question: Question) -> Compute:
    return compute_of(
        question.model,
        question.profile,
        question.cluster.per_host,
        question.batch,
        question.precision,
    )


def settings(question: Question, way: Way) -> list[ClusterSetting]:
    """The settings to try: one for each useful value of "algorithm", which only sealring has."""
    choices: list[Algorithm | None] = [None]
    if way == "sealed" and question.ranks > 2:
        choices += [Algorithm.TREE, Algorithm.HIERARCHICAL]
    return [
        ClusterSetting(question.profile, way, question.network, question.cluster, each)
        for each in choices
    ]


# ---- DDP and its buckets


def _caps(question: Question) -> list[float | None]:
    whole = question.model.count * ITEMSIZE[question.precision] / (1 << 20)
    caps: list[float | None] = [None]
    caps += [cap for cap in CAPS_MB if cap < whole]
    return [*caps, float(-(-whole // 1))]


_Tried = list[tuple[BucketAnswer, dict[Way, tuple[PlannedStep, ClusterSetting]]]]


def _buckets_tried(question: Question, compute: Compute) -> _Tried:
    tried: _Tried = []
    for cap in _caps(question):
        buckets = buckets_of(question.model, cap, ITEMSIZE[question.precision])
        steps: dict[Way, tuple[PlannedStep, ClusterSetting]] = {}
        for way in question.profile.ways():
            timed = [(ddp_step(s, compute, buckets), s) for s in settings(question, way)]
            steps[way] = min(timed, key=lambda pair: pair[0].seconds)
        seconds: dict[str, float] = {way: step.seconds for way, (step, _) in steps.items()}
        bucket_mb = DEFAULT_CAP_MB if cap is None else cap
        tried.append((BucketAnswer(bucket_mb, cap is None, len(buckets), seconds), steps))
    return tried


def _ways(
    question: Question, compute: Compute, best: LayoutAnswer, tried: _Tried
) -> list[WayAnswer]:
    found: list[WayAnswer] = []
    for way in question.profile.ways():
        if best.layout == "ddp":
            # The fastest; of sizes that are about equally fast, the first that was tried.
            taken, steps = next(
                (bucket, steps)
                for bucket, steps in tried
                if bucket.seconds[way] <= best.seconds[way] * 1.001
            )
            step, setting = steps[way]
            bucket_mb: float | None = taken.bucket_mb
            is_default, count = taken.default, taken.all_reduces
            algorithm = setting.algorithm
            default = next((each.seconds[way] for each, _ in tried if each.default), None)
        else:
            step = _spread_step(question, compute, best, way)
            bucket_mb, is_default, count, default, algorithm = None, False, 0, None, None
        plain = found[0].seconds if found else step.seconds
        rate = question.batch * question.ranks / step.seconds
        price = question.price
        found.append(
            WayAnswer(
                way=way,
                layout=best.layout,
                seconds=step.seconds,
                against_plain=step.seconds / plain,
                compute_s=compute.total_s,
                communicating_s=step.communicating_s,
                exposed_s=step.exposed_s,
                bucket_mb=bucket_mb,
                default_buckets=is_default,
                all_reduces=count,
                algorithm="by size" if algorithm is None else algorithm.name.lower(),
                default_bucket_seconds=default,
                samples_per_s=rate,
                cost_per_million_samples=(
                    None if price is None else price * question.ranks / 3600 / rate * 1e6
                ),
            )
        )
    return found


# ---- which layouts fit into memory


def _layouts(question: Question, compute: Compute) -> Iterator[LayoutAnswer]:
    model, cluster = question.model, question.cluster
    precision, batch = question.precision, question.batch
    memory = ddp_memory(model, cluster, precision, batch)
    yield _layout(question, "ddp", memory, {})
    if question.ranks == 1:
        return
    units = fsdp_units(model)
    memory = fsdp_memory(model, cluster, precision, batch, max(units))
    seconds = {
        way: fsdp_step(settings(question, way)[0], model, compute, precision).seconds
        for way in question.profile.ways()
    }
    yield _layout(question, "fsdp", memory, seconds)
    if (chosen := _tensor_pipeline(question)) is not None:
        tensor, pipeline = chosen
        memory = sharded_memory(model, cluster, precision, tensor, pipeline)
        steps = {
            way: tensor_pipeline_step(
                settings(question, way)[0], model, compute, batch, precision, tensor, pipeline
            ).seconds
            for way in question.profile.ways()
        }
        yield _layout(question, f"tp{tensor} x pp{pipeline}", memory, steps)


def _tensor_pipeline(question: Question) -> tuple[int, int] | None:
    """The (tensor, pipeline) with the fewest ranks per replica that fits into memory.

    Prefers tensor parallelism within a host. If none fits, returns the largest; None if the model
    is not a transformer.
    """
    shape = question.model.transformer
    if shape is None:
        return None
    largest: tuple[int, int] | None = None
    for shards in range(2, question.ranks + 1):
        if question.ranks % shards:
            continue
        for tensor in range(min(shards, question.cluster.per_host), 0, -1):
            pipeline = shards // tensor
            divides = shards % tensor == 0 and shape.heads % tensor == 0
            if not divides or pipeline > shape.layers:
                continue
            largest = tensor, pipeline
            memory = sharded_memory(
                question.model, question.cluster, question.precision, tensor, pipeline
            )
            if _fits(question, memory):
                return largest
            break
    return largest


def _layout(
    question: Question, name: str, memory: Memory, seconds: dict[Any, float]
) -> LayoutAnswer:
    return LayoutAnswer(name, memory.device_bytes, _fits(question, memory), dict(seconds), memory)


def _fits(question: Question, memory: Memory) -> bool:
    return _needed(question, memory) <= question.profile.device.memory_bytes.value


def _needed(question: Question, memory: Memory) -> float:
    """The memory needed on a GPU by its ranks (usually one), or on a host by all its ranks."""
    device = question.profile.device
    if device.kind == "gpu":
        return memory.device_bytes * max(1, question.cluster.per_host / device.cores_per_host.value)
    return (memory.device_bytes + memory.host_links) * question.cluster.per_host


def _best_layout(fitting: list[LayoutAnswer]) -> LayoutAnswer:
    """DDP if it fits, because it is the simplest; else the layout that is fastest when
    protected."""
    if fitting[0].layout == "ddp":
        return fitting[0]
    return min(fitting, key=lambda each: list(each.seconds.values())[-1])


def _spread_step(question: Question, compute: Compute, best: LayoutAnswer, way: Way) -> PlannedStep:
    setting = settings(question, way)[0]
    if best.layout == "fsdp":
        return fsdp_step(setting, question.model, compute, question.precision)
    tensor, pipeline = (int(part.strip("tp")) for part in best.layout.split(" x "))
    return tensor_pipeline_step(
        setting, question.model, compute, question.batch, question.precision, tensor, pipeline
    )


def _why(question: Question, layouts: list[LayoutAnswer], best: LayoutAnswer) -> str:
    if best.layout == "ddp":
        return "the whole model fits on every rank"
    room = question.profile.device.memory_bytes.value
    refused = [
        f"{each.layout} needs {_needed(question, each.memory) / 1e9:.1f} GB"
        for each in layouts
        if not each.fits
    ]
    return f"{', '.join(refused)} of {room / 1e9:.0f} GB"


def _too_large(question: Question, layouts: list[LayoutAnswer]) -> str:
    room = question.profile.device.memory_bytes.value
    least = min(_needed(question, each.memory) for each in layouts)
    ranks = f"{question.ranks} rank{'s' if question.ranks > 1 else ''}"
    where = "a GPU" if question.profile.device.kind == "gpu" else "a host"
    way_out = (
        "take more ranks, a smaller --batch or --precision bf16"
        if question.profile.device.kind == "gpu"
        else "take fewer ranks per host (--per-host), a smaller --batch or a smaller model"
    )
    return (
        f"{question.model.name} on {ranks} needs {least / 1e9:.1f} GB of memory on {where}, "
        f"which has {room / 1e9:.1f} GB: {way_out}"
    )


# ---- algorithms


def _algorithms(question: Question) -> list[SizeAnswer]:
    if question.profile.sealed is None or question.ranks < 2:
        return []
    return [_fastest(question.profile, question.network, question.cluster, n) for n in _SIZES]


@lru_cache(maxsize=1024)
def _fastest(profile: Profile, network: Network, cluster: Cluster, nbytes: int) -> SizeAnswer:
    def timed(algorithm: Algorithm | None) -> tuple[float, Algorithm]:
        setting = ClusterSetting(profile, "sealed", network, cluster, algorithm)
        taken = setting.takes(Operation.ALL_REDUCE, nbytes, waits=True)
        return taken.seconds, taken.algorithm

    default_seconds, default = timed(None)
    # Direct opens world - 1 whole tensors; it is left out if these are too many bytes.
    worth = [a for a in Algorithm if a is not Algorithm.DIRECT or cluster.ranks * nbytes < 1 << 28]
    seconds, best = min(timed(each) for each in worth)
    return SizeAnswer(nbytes, best.name.lower(), seconds, default.name.lower(), default_seconds)


# ---- DDP with the planned bucket size


def tune(
    module: Any,
    *,
    profile: str | Path | None = None,
    network: str | None = None,
    process_group: Any = None,
    batch: int = 1,
    **options: Any,
) -> Any:
    """Returns `DistributedDataParallel(module, bucket_cap_mb=planned, **options)`.

    Call it where you would wrap the model, after init_process_group, with the same arguments on
    every rank. `profile` is the name of a profile (`sealring plan --list`), or the results.json of
    `sealring bench all` on a machine like this one. The default for a model on a GPU is
    h200-sealring; a model on CPUs needs a profile. `options` are DDP's. If they contain a
    bucket_cap_mb, it is not changed.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    if not dist.is_initialized():
        raise ConfigurationError("call init_process_group first: the plan depends on the world")
    if "bucket_cap_mb" not in options:
        group = process_group if process_group is not None else dist.group.WORLD
        options["bucket_cap_mb"] = planned_bucket_mb(
            module,
            ranks=dist.get_world_size(group),
            per_host=int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or None,
            profile=profile,
            network=network,
            batch=batch,
        )
    return DistributedDataParallel(module, process_group=process_group, **options)


def planned_bucket_mb(
    module: Any,
    *,
    ranks: int,
    per_host: int | None = None,
    profile: str | Path | None = None,
    network: str | None = None,
    batch: int = 1,
) -> float | None:
    """The bucket_cap_mb with the shortest sealed step; None for torch's default buckets."""
    import torch

    model = from_module(module, type(module).__name__)
    first = next(module.parameters())
    if profile is None:
        if first.device.type == "cpu":
            raise ConfigurationError(
                "tune() knows no profile of this machine: measure one with `sealring bench all` "
                "and pass profile='results.json'"
            )
        profile = "h200-sealring"
    known = machine(str(profile), "cpu" if first.device.type == "cpu" else None)
    precision: Precision = "fp32" if first.dtype == torch.float32 else "bf16"
    found = answer(
        Question(
            model,
            known,
            load_network(network or known.network),
            ranks,
            per_host or min(ranks, int(known.device.ranks_per_host.value)),
            batch,
            precision,
        )
    )
    planned = next((each for each in found.ways if each.way == "sealed"), found.ways[0])
    return None if planned.default_buckets else planned.bucket_mb


def machine(name: str, kind: Literal["cpu"] | None = None) -> Profile:
    """Returns a profile by name, from a .toml file, or fitted to a results file.

    From a results file it is the GPU's profile, if a GPU was measured and `kind` is not "cpu".
    """
    if name.endswith(".json"):
        from sealring.lab.plan.fit import gpu_of, gpu_profile_of, profile_of
        from sealring.lab.results import read_results

        results = read_results(Path(name))
        on_gpu = kind is None and gpu_of(results) is not None
        return gpu_profile_of(results) if on_gpu else profile_of(results)
    return load_profile(name)
