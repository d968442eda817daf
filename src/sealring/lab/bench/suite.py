"""The jobs of each benchmark whose results a file can hold. `sealring bench all` runs all of
them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Literal

from sealring.lab.bench import collectives as exchanges
from sealring.lab.bench import gpu as on_gpu
from sealring.lab.bench import kernels
from sealring.lab.bench.collectives import (
    COLLECTIVES,
    OPERATIONS,
    SIZES,
    Effort,
    measure_link,
    plan_of,
)
from sealring.lab.bench.forming import measure_scale
from sealring.lab.bench.harness import BenchJob
from sealring.lab.bench.step import StepSetting, Work, measure_steps, training_bytes
from sealring.lab.bench.workers import WorkerPlace, find_place

MIB: Final = 1 << 20
QUICK: Final = Effort(blocks=7, block_bytes=8 * MIB, most_calls=10)


def aead(blocks: int) -> list[BenchJob]:
    cores = len(os.sched_getaffinity(0))
    return [
        BenchJob(f"kernels, {count} at once", 1, partial(kernels.measure_kernels, count, blocks))
        for count in dict.fromkeys([1, cores])
    ]


def link(
    transports: Sequence[str],
    variants: Sequence[str],
    effort: Effort,
    operations: Sequence[str] = OPERATIONS,
    sizes: Sequence[int] = SIZES,
) -> list[BenchJob]:
    return [
        BenchJob(
            f"a link over {transport}",
            len(operations),
            partial(measure_link, transport, operations, sizes, variants, effort),
        )
        for transport in transports
    ]


def collectives(
    section: Literal["allreduce", "collectives"],
    names: Sequence[str],
    worlds: Sequence[int],
    sizes: Sequence[int],
    transport: str,
    variants: Sequence[str],
    effort: Effort,
) -> list[BenchJob]:
    jobs = []
    for ranks in worlds:
        plan = plan_of(names, ranks, sizes)
        measure = partial(exchanges.measure, section, plan, ranks, transport, variants, effort)
        jobs.append(BenchJob(f"{section}, {ranks} ranks, {transport}", len(plan), measure))
    return jobs


def steps(works: Iterable[Work]) -> list[BenchJob]:
    """One job for each world; before them, each model once by a single process."""
    works = list(works)
    computing = [work for work in works if "compute" in work.variants]
    settings = _once([setting for work in computing for setting in work.settings])
    alone = [
        replace(work, ranks=1, variants=("compute",), settings=settings, trace=None)
        for work in computing[:1]
    ]
    return [_step_job(work) for work in (*alone, *works)]


def _step_job(work: Work) -> BenchJob:
    models = ", ".join(dict.fromkeys(setting.model for setting in work.settings))
    ranks = f"{work.ranks} rank{'s' if work.ranks > 1 else ''}"
    return BenchJob(f"training {models}, {ranks}", len(work.settings), partial(measure_steps, work))


def _once(settings: Sequence[StepSetting]) -> tuple[StepSetting, ...]:
    """One setting for each model, batch and precision; without communication buckets have no
    effect."""
    first = {(each.model, each.batch, each.precision): each for each in reversed(settings)}
    return tuple(reversed(list(first.values())))


def scale(numbers: Sequence[int]) -> list[BenchJob]:
    return [
        BenchJob(f"groups of {ranks} light workers", 1, partial(measure_scale, ranks))
        for ranks in numbers
    ]


GPU_PARTS: Final = ("kernels", "allreduce", "step")
_FEW_RANKS: Final = 4


def few(worlds: Sequence[int]) -> list[int]:
    """The small worlds, which use every wire and train."""
    return [each for each in worlds if each <= _FEW_RANKS] or [min(worlds)]


def gpu(
    parts: Sequence[str],
    worlds: Sequence[int],
    models: Sequence[str],
    wires: Sequence[str],
    place: WorkerPlace,
    step_wire: str = "host",
    blocks: int = 11,
) -> list[BenchJob]:
    """The jobs on one GPU: all-reduces by each number of ranks, steps by the largest small world.

    Larger worlds use only NCCL, as many ranks do between hosts.
    """
    one = replace(place, gpus=1)
    most = max(few(worlds))
    jobs = []
    if "kernels" in parts:
        jobs.append(BenchJob(f"kernels of {one.name}", 1, partial(on_gpu.measure_kernels, one)))
    for ranks in worlds if "allreduce" in parts else ():
        # Separate workers for each wire, because with many ranks a wire's groups need much memory.
        for wire in wires if ranks <= most else [wire for wire in wires if wire in on_gpu.BY_NCCL]:
            arguments = (one, ranks, on_gpu.BYTES, [wire], blocks)
            measure = partial(on_gpu.measure_allreduces, *arguments)
            jobs.append(BenchJob(f"all-reduce, {ranks} ranks on one GPU, {wire}", 1, measure))
    for model in models if "step" in parts else ():
        train = partial(on_gpu.measure_step, one, model, most, step_wire, blocks)
        jobs.append(BenchJob(f"training {model}, {most} ranks on one GPU", 1, train))
    return jobs


def everything(*, quick: bool) -> dict[str, list[BenchJob]]:
    """All jobs by part, for this machine's cores and, if torch finds one, a GPU. Quick ones take
    minutes, all together most of an hour."""
    parts = _on_cores(quick=quick)
    place = find_place("auto")
    if place.kind == "cuda":
        worlds, models = ([4], on_gpu.MODELS[:1]) if quick else ([2, 4, 8, 16], on_gpu.MODELS)
        room = place.free_bytes()
        fitting = [each for each in models if _FEW_RANKS * training_bytes(each, "fp32") <= room]
        parts["gpu"] = gpu(
            GPU_PARTS, worlds, fitting, on_gpu.WIRES, place, blocks=7 if quick else 11
        )
    return parts


def _on_cores(*, quick: bool) -> dict[str, list[BenchJob]]:
    every = ("plain", "sealed", "cc")
    names, sizes = list(COLLECTIVES), [4 << 10, MIB, 25 * MIB]
    both = partial(collectives, "collectives", names, transport="shm", variants=every[:2])
    allreduce = partial(collectives, "allreduce", ["all_reduce"], variants=every)
    if quick:
        few = {"mlp": [25.0], "gpt-demo": [25.0]}
        more = {"mlp": [1.0, 25.0], "gpt-demo": [25.0], "gpt-small": [25.0]}
        return {
            "aead": aead(blocks=7),
            "link": link(["shm", "tcp"], every, QUICK, ["all_reduce"], SIZES[::2]),
            "allreduce": allreduce([2, 4], sizes, transport="shm", effort=QUICK),
            "collectives": both([2], [MIB], effort=QUICK),
            "step": steps([_training(2, more), _training(4, few)]),
            "scale": scale([9, 16, 36]),
        }
    effort = Effort()
    buckets = [1.0, 5.0, 25.0, 100.0]
    models = {"mlp": buckets, "gpt-demo": buckets, "gpt-small": buckets}
    return {
        "aead": aead(blocks=21),
        "link": link(["shm", "tcp"], every, effort),
        "allreduce": [
            *allreduce([2, 3, 4], [*sizes, 64 << 10], transport="shm", effort=effort),
            *allreduce([2, 4], sizes, transport="tcp", effort=effort),
        ],
        "collectives": both([2, 4], [4 << 10, 25 * MIB], effort=effort),
        "step": steps(_training(ranks, models, 7) for ranks in (2, 3, 4)),
        "scale": scale([4, 9, 16, 36, 64, 144]),
    }


def _training(ranks: int, models: Mapping[str, Sequence[float]], count: int = 5) -> Work:
    """`count` steps of each model with each of its bucket sizes."""
    from sealring.lab.bench.models import find

    settings = tuple(
        StepSetting(model, find(model).batch, "fp32", bucket)
        for model, buckets in models.items()
        for bucket in buckets
    )
    return Work(ranks, settings, ("compute", "plain", "sealed", "cc"), count)
