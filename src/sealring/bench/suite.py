"""What each `sealring bench` measures, and what `bench all` makes of it.

A GPU's kernels are a part like the others: its jobs go into `everything`, its cases into
Results.gpu.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
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


def everything(*, quick: bool) -> list[Job]:
    """All of it on this machine's cores: in under four minutes on two, or in about an hour."""
    every = ("plain", "sealed", "cc")
    if quick:
        return [
            *aead(blocks=7),
            *link(["shm", "tcp"], every, QUICK, ["all_reduce"]),
            *allreduce([2, 4], [4 << 10, MIB, 25 * MIB], "shm", every, QUICK),
            *collectives(list(COLLECTIVES), [2], [MIB], "shm", QUICK),
            *steps(
                [
                    _training(2, ["mlp", "gpt-demo", "gpt-small"], [1.0, 25.0], 5),
                    _training(4, ["mlp", "gpt-demo"], [1.0, 25.0], 5),
                ]
            ),
        ]
    effort = Effort()
    buckets = [1.0, 5.0, 25.0, 100.0]
    models = ["mlp", "gpt-demo", "gpt-small"]
    return [
        *aead(blocks=21),
        *link(["shm", "tcp"], every, effort),
        *allreduce([2, 3, 4], [4 << 10, 64 << 10, MIB, 25 * MIB - 16], "shm", every, effort),
        *allreduce([2, 4], [4 << 10, MIB, 25 * MIB], "tcp", every, effort),
        *collectives(list(COLLECTIVES), [2, 4], [4 << 10, 25 * MIB], "shm", effort),
        *steps([_training(ranks, models, buckets, 11) for ranks in (2, 3, 4)]),
    ]


def _training(ranks: int, models: Sequence[str], buckets: Sequence[float], count: int) -> Work:
    from sealring.bench.models import find

    return Work(
        ranks,
        tuple(Setting(m, find(m).batch, "fp32", cap) for m in models for cap in buckets),
        ("compute", "plain", "sealed", "cc"),
        count,
    )
