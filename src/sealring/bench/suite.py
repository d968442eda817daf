"""What each `sealring bench` measures, and what `bench all` makes of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from sealring.bench import scale
from sealring.bench.allreduce import measure_allreduce
from sealring.bench.collectives import COLLECTIVES, measure_collectives, plan_of
from sealring.bench.exchange import Effort
from sealring.bench.gpu import allreduce as gpu_allreduce
from sealring.bench.gpu import kernels as gpu_kernels
from sealring.bench.gpu import steps as gpu_steps
from sealring.bench.gpu.groups import BY_NCCL, WIRES
from sealring.bench.kernels import measure_kernels
from sealring.bench.link import OPERATIONS, SIZES, measure_link
from sealring.bench.place import Place, find_place
from sealring.bench.session import Job
from sealring.bench.step import Setting, Work, measure_steps
from sealring.bench.trainee import training_bytes

MIB: Final = 1 << 20
QUICK: Final = Effort(blocks=7, block_bytes=8 * MIB, most_calls=10)


def aead(blocks: int) -> list[Job]:
    cores = len(os.sched_getaffinity(0))
    counts = [1] if cores == 1 else [1, cores]
    return [
        Job(
            f"kernels, {count} at once",
            1,
            lambda progress, count=count: measure_kernels(count, blocks, progress),  # type: ignore[misc]
        )
        for count in counts
    ]


def link(
    transports: Sequence[str],
    variants: Sequence[str],
    effort: Effort,
    operations: Sequence[str] = OPERATIONS,
    sizes: Sequence[int] = SIZES,
) -> list[Job]:
    return [
        Job(
            f"a link over {transport}",
            len(operations),
            lambda progress, transport=transport: measure_link(  # type: ignore[misc]
                transport, operations, sizes, variants, effort, progress
            ),
        )
        for transport in transports
    ]


def allreduce(
    worlds: Sequence[int],
    sizes: Sequence[int],
    transport: str,
    variants: Sequence[str],
    effort: Effort,
    threads: int | None = None,
) -> list[Job]:
    return [
        Job(
            f"all-reduce, {ranks} ranks, {transport}",
            len(sizes),
            lambda progress, ranks=ranks: measure_allreduce(  # type: ignore[misc]
                ranks, sizes, transport, variants, effort, progress, threads
            ),
        )
        for ranks in worlds
    ]


def collectives(
    names: Sequence[str],
    worlds: Sequence[int],
    sizes: Sequence[int],
    transport: str,
    effort: Effort,
) -> list[Job]:
    return [
        Job(
            f"collectives, {ranks} ranks, {transport}",
            len(plan_of(names, ranks, sizes)),
            lambda progress, ranks=ranks: measure_collectives(  # type: ignore[misc]
                names, ranks, sizes, transport, effort, progress
            ),
        )
        for ranks in worlds
    ]


def steps(works: Iterable[Work]) -> list[Job]:
    """A world for each; before them all, each model by one process alone, once."""
    works = list(works)
    computing = [work for work in works if "compute" in work.variants]
    settings = _once([setting for work in computing for setting in work.settings])
    alone = [
        replace(work, ranks=1, variants=("compute",), settings=settings, trace=None)
        for work in computing[:1]
    ]
    return [_step_job(work) for work in (*alone, *works)]


def _step_job(work: Work) -> Job:
    models = ", ".join(dict.fromkeys(setting.model for setting in work.settings))
    return Job(
        f"training {models}, {work.ranks} rank{'s' if work.ranks > 1 else ''}",
        len(work.settings),
        lambda progress: measure_steps(work, progress),
    )


def _once(settings: Sequence[Setting]) -> tuple[Setting, ...]:
    """One for each model, batch and precision: without communication buckets do not matter."""
    first = {(each.model, each.batch, each.precision): each for each in reversed(settings)}
    return tuple(reversed(list(first.values())))


GPU_PARTS: Final = ("kernels", "allreduce", "step")
_FEW_RANKS: Final = 4


def few(worlds: Sequence[int]) -> list[int]:
    """Those that have every wire, and train."""
    return [each for each in worlds if each <= _FEW_RANKS] or [min(worlds)]


def gpu(
    parts: Sequence[str],
    worlds: Sequence[int],
    models: Sequence[str],
    wires: Sequence[str],
    place: Place,
    step_wire: str = "host",
    blocks: int = 11,
) -> list[Job]:
    """On one GPU: all-reduces by each number of ranks, steps by the largest of the few.

    More than a few ranks go by NCCL alone: that is what many ranks have between hosts.
    """
    one = replace(place, gpus=1)
    size = gpu_allreduce.BYTES
    most = max(few(worlds))
    jobs = []
    if "kernels" in parts:
        jobs.append(Job(f"kernels of {one.name}", 1, partial(gpu_kernels.measure_kernels, one)))
    for ranks in worlds if "allreduce" in parts else ():
        # Workers of its own for each wire: with many ranks, one wire's groups take much memory.
        for wire in wires if ranks <= most else [wire for wire in wires if wire in BY_NCCL]:
            measure = partial(gpu_allreduce.measure_allreduces, one, ranks, size, [wire], blocks)
            jobs.append(Job(f"all-reduce, {ranks} ranks on one GPU, {wire}", 1, measure))
    for model in models if "step" in parts else ():
        train = partial(gpu_steps.measure_step, one, model, most, step_wire, blocks)
        jobs.append(Job(f"training {model}, {most} ranks on one GPU", 1, train))
    return jobs


def everything(*, quick: bool) -> dict[str, list[Job]]:
    """All of it, by part: in minutes, or in the better part of an hour. On this machine's cores,
    and on a GPU where torch finds one."""
    parts = _on_cores(quick=quick)
    place = find_place("auto")
    if place.kind == "cuda":
        worlds, models = ([4], gpu_steps.MODELS[:1]) if quick else ([2, 4, 8, 16], gpu_steps.MODELS)
        fitting = [each for each in models if _fits(each, _FEW_RANKS, place)]
        parts["gpu"] = gpu(GPU_PARTS, worlds, fitting, WIRES, place, blocks=7 if quick else 11)
    return parts


def _fits(model: str, ranks: int, place: Place) -> bool:
    return ranks * training_bytes(model, "fp32") <= place.free_bytes()


def _on_cores(*, quick: bool) -> dict[str, list[Job]]:
    every = ("plain", "sealed", "cc")
    names = list(COLLECTIVES)
    if quick:
        few = {"mlp": [25.0], "gpt-demo": [25.0]}
        more = {"mlp": [1.0, 25.0], "gpt-demo": [25.0], "gpt-small": [25.0]}
        return {
            "aead": aead(blocks=7),
            "link": link(["shm", "tcp"], every, QUICK, ["all_reduce"], SIZES[::2]),
            "allreduce": allreduce([2, 4], [4 << 10, MIB, 25 * MIB], "shm", every, QUICK),
            "collectives": collectives(names, [2], [MIB], "shm", QUICK),
            "step": steps([_training(2, more), _training(4, few)]),
            "scale": scale.jobs([9, 16, 36]),
        }
    effort = Effort()
    buckets = [1.0, 5.0, 25.0, 100.0]
    models = {"mlp": buckets, "gpt-demo": buckets, "gpt-small": buckets}
    return {
        "aead": aead(blocks=21),
        "link": link(["shm", "tcp"], every, effort),
        "allreduce": [
            *allreduce([2, 3, 4], [4 << 10, 64 << 10, MIB, 25 * MIB], "shm", every, effort),
            *allreduce([2, 4], [4 << 10, MIB, 25 * MIB], "tcp", every, effort),
        ],
        "collectives": collectives(names, [2, 4], [4 << 10, 25 * MIB], "shm", effort),
        "step": steps(_training(ranks, models, 7) for ranks in (2, 3, 4)),
        "scale": scale.jobs([4, 9, 16, 36, 64, 144]),
    }


def _training(ranks: int, models: Mapping[str, Sequence[float]], count: int = 5) -> Work:
    """`count` steps of each model with each of its bucket sizes."""
    from sealring.bench.models import find

    return Work(
        ranks,
        tuple(
            Setting(model, find(model).batch, "fp32", bucket)
            for model, buckets in models.items()
            for bucket in buckets
        ),
        ("compute", "plain", "sealed", "cc"),
        count,
    )
