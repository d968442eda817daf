"""What each `sealring bench` measures, and what `bench all` makes of it.

A GPU's kernels are a part like the others: its jobs go into `everything`, its cases into
Results.gpu, its command into cli/bench.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from sealring.bench.allreduce import measure_allreduce
from sealring.bench.collectives import COLLECTIVES, measure_collectives, plan_of
from sealring.bench.exchange import Effort
from sealring.bench.kernels import measure_kernels
from sealring.bench.link import OPERATIONS, SIZES, measure_link
from sealring.bench.session import Job
from sealring.bench.step import Setting, Work, measure_steps

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
) -> list[Job]:
    return [
        Job(
            f"all-reduce, {ranks} ranks, {transport}",
            len(sizes),
            lambda progress, ranks=ranks: measure_allreduce(  # type: ignore[misc]
                ranks, sizes, transport, variants, effort, progress
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
    """A world for each; what one process computes by itself comes first."""
    jobs = []
    for work in works:
        if "compute" in work.variants and work.ranks > 1:
            alone = replace(work, ranks=1, variants=("compute",), settings=_once(work.settings))
            jobs.append(_step_job(replace(alone, trace=None)))
        jobs.append(_step_job(work))
    # Several worlds train the same models: by itself each is measured once.
    return list({(job.label, job.count): job for job in jobs}.values())


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


def everything(*, quick: bool) -> dict[str, list[Job]]:
    """All of it on this machine's cores, by part: in minutes, or in the better part of an hour."""
    every = ("plain", "sealed", "cc")
    names = list(COLLECTIVES)
    if quick:
        few, many = {"mlp": [1.0, 25.0], "gpt-demo": [25.0]}, {"gpt-small": [25.0]}
        return {
            "aead": aead(blocks=7),
            "link": link(["shm", "tcp"], every, QUICK, ["all_reduce"]),
            "allreduce": allreduce([2, 4], [4 << 10, MIB, 25 * MIB], "shm", every, QUICK),
            "collectives": collectives(names, [2], [MIB], "shm", QUICK),
            "step": steps([_training(2, few | many), _training(4, few)]),
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
