"""A results file of an imagined machine, whose times follow exactly from a profile.

A fit to the file must find that profile again and predict its steps.
"""

from __future__ import annotations

import dataclasses

from sealring.core.schedule import Operation
from sealring.lab.plan.collectives import Cluster
from sealring.lab.plan.layouts import ClusterSetting, Compute, alone, buckets_of, ddp_step
from sealring.lab.plan.models import load_model
from sealring.lab.plan.profiles import Figure, Profile, Way, load_network
from sealring.lab.results import (
    CollectiveCase,
    Kernel,
    KernelCase,
    LinkCase,
    LinkPoint,
    Results,
    StepCase,
    StepPart,
    Transport,
)
from tests.lab.results.examples import MACHINE

SIZES = (4096, 65536, 1 << 20, 4 << 20, 25 << 20)
RATES: dict[Kernel, float] = {"seal": 2.0e9, "open": 2.1e9, "reduce": 6e9, "copy": 8e9}
COMPUTE = {1: Compute(0.02, 0.04, 0.01), 2: Compute(0.022, 0.044, 0.011)}


def results_of(profile: Profile) -> Results:
    """Makes the results; `profile`'s kernels must have the rates above."""
    return Results(
        command="imagined",
        made="2026-11-15T08:00:00Z",
        complete=True,
        stopped=None,
        machine=dataclasses.replace(MACHINE, cores=2),
        aead=[
            KernelCase(kernel, "cpu", "", 1 << 24, 126976, 2, 1 << 25, 0, 0, [(1 << 24) / rate] * 3)
            for kernel, rate in RATES.items()
        ],
        link=[_link(profile, way) for way in profile.ways()],
        allreduce=[
            _all_reduce(profile, way, ranks, size)
            for way in profile.ways()
            for ranks in (2, 3, 4)
            for size in SIZES
        ],
        step=[
            *(_compute(ranks, COMPUTE[ranks]) for ranks in (1, 2)),
            *(_step(profile, way, cap) for way in profile.ways() for cap in (1.0, 5.0, 100.0)),
        ],
    )


def _seconds(profile: Profile, way: Way, ranks: int, nbytes: int) -> float:
    setting = ClusterSetting(profile, way, load_network("100gbe"), Cluster(ranks, ranks))
    return alone(setting, Operation.ALL_REDUCE, nbytes)


def _link(profile: Profile, way: Way) -> LinkCase:
    points = [LinkPoint(n // 2, 2, [_seconds(profile, way, 2, n)] * 3) for n in SIZES]
    transport: Transport = "shm" if way == "sealed" else "tcp"
    return LinkCase("all_reduce", transport, way, "cpu", 1, points, None)


def _all_reduce(profile: Profile, way: Way, ranks: int, nbytes: int) -> CollectiveCase:
    seconds = [_seconds(profile, way, ranks, nbytes)] * 3
    transport: Transport = "shm" if way == "sealed" else "tcp"
    return CollectiveCase(
        "all_reduce", ranks, nbytes, "float32", transport, way, "cpu", 0, 0, 2, seconds
    )  # fmt: skip


def _compute(ranks: int, compute: Compute) -> StepCase:
    split = [
        StepPart("forward", compute.forward_s, 0.0),
        StepPart("backward", compute.backward_s, 0.0),
        StepPart("optimizer", compute.optimizer_s, 0.0),
    ]
    return StepCase(
        "gpt-small", 10_834_944, ranks, 2, 512, "fp32", 0.0, 0, "none", "compute", "cpu", 0, 3,
        [compute.total_s] * 3, split,
    )  # fmt: skip


def _step(profile: Profile, way: Way, cap: float) -> StepCase:
    model = load_model("gpt-small")
    buckets = buckets_of(model, cap, 4)
    setting = ClusterSetting(profile, way, load_network("100gbe"), Cluster(2, 2))
    seconds = ddp_step(setting, COMPUTE[2], buckets).seconds
    return StepCase(
        "gpt-small", model.count, 2, 2, 512, "fp32", cap, len(buckets), "shm", way, "cpu", 0, 4,
        [seconds] * 3, [],
    )  # fmt: skip


def figure(value: float) -> Figure:
    return Figure(value, "imagined")
