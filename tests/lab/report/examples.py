"""Made-up results of a whole run, always the same, with all that the page must handle."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from sealring.lab.bench.collectives import fit
from sealring.lab.results import (
    CollectiveCase,
    KernelCase,
    LinkCase,
    LinkPoint,
    Results,
    ScaleCase,
    Span,
    StepCase,
    StepPart,
)
from tests.lab.results.examples import MACHINE

MIB = 1 << 20


def samples(middle: float, generator: random.Random, count: int = 9) -> list[float]:
    return [middle * generator.uniform(0.97, 1.03) for _ in range(count)]


def whole(seed: int = 0, factor: float = 1.0, **changes: Any) -> Results:
    """Makes the results; `factor` makes everything sealed slower."""
    draw = random.Random(seed)
    results = Results(
        command="sealring bench all --quick",
        made="2026-11-15T08:00:00Z",
        complete=True,
        stopped=None,
        machine=MACHINE,
        aead=_kernels(draw, factor),
        link=_links(draw, factor),
        allreduce=_allreduce(draw, factor),
        step=_steps(draw, factor),
        scale=[
            ScaleCase(
                ranks, what, ranks - 1, 0, 3 * ranks, 1000 * ranks, 0.1 * ranks, cpu, 0.01, 10**8
            )
            for ranks in (16, 64, 256)
            for what, cpu in (("world", 0.01 + ranks * 4e-4), ("all_reduce", 6e-4), ("mesh", 0.02))
        ],
    )
    return dataclasses.replace(results, **changes)


GPU = "NVIDIA H200"


def with_gpu(seed: int = 0, **changes: Any) -> Results:
    """Makes the results of a machine that also has a GPU, which misses one of its bars."""
    draw, base = random.Random(seed), whole(seed)
    machine = dataclasses.replace(MACHINE, gpus=[GPU], gpu_memory_bytes=150_000_000_000)
    results = dataclasses.replace(
        base,
        machine=machine,
        gpu=_gpu_kernels(draw),
        allreduce=[*base.allreduce, *_gpu_allreduce(draw)],
        step=[*base.step, *_gpu_steps(draw)],
    )
    return dataclasses.replace(results, **changes)


def _gpu_kernels(draw: random.Random) -> list[KernelCase]:
    size, suite = 1 << 30, "ChaCha20-Poly1305"
    cipher = size // 64 * 1060
    shapes = [
        ("copy", "", size, size, 2 * size, 0, 5.2e-4),
        ("matmul", "", 1 << 28, 1 << 28, 3 << 28, 2 * 8192**3, 2.9e-3),
        ("seal", suite, size, 1 << 18, 2 * size, cipher, 1.07e-3),
        ("open", suite, size, 1 << 18, 3 * size, cipher, 1.1e-3),
        ("open_reduce", suite, size, 1 << 18, 4 * size, cipher + size // 4, 1.2e-3),
        ("hop", suite, size, 1 << 18, 4 * size, 2 * cipher + size // 4, 2.2e-3),
        ("launch", suite, 4096, 4096, 0, 67840, 1.9e-5),
    ]
    return [
        KernelCase(kernel, GPU, cipher, n, record, 1, moved, ops, 20, [t] * 9)  # type: ignore[arg-type]
        for kernel, cipher, n, record, moved, ops, t in shapes
    ]


def _gpu_allreduce(draw: random.Random) -> list[CollectiveCase]:
    times = {
        ("sealed", "host"): 0.159, ("unsealed", "host"): 0.158, ("plain", "tcp"): 0.22,
        ("sealed", "peer"): 0.012, ("sealed", "nccl"): 0.17, ("plain", "nccl"): 0.3,
    }  # fmt: skip
    return [
        CollectiveCase(
            "all_reduce", ranks, 256 * MIB, "float32", transport, variant, GPU, 0, 0, 20 + ranks,  # type: ignore[arg-type]
            samples(seconds * ranks / 4, draw),
        )
        for ranks in (2, 4)
        for (variant, transport), seconds in times.items()
    ]  # fmt: skip


def _gpu_steps(draw: random.Random) -> list[StepCase]:
    return [
        StepCase(
            model, parameters, 4, 4, 4096, "fp32", 25.0, 13, "host", variant, GPU,  # type: ignore[arg-type]
            6 * parameters, run, samples(seconds * factor, draw), [],
        )
        for run, (model, parameters, seconds) in enumerate(
            (("gpt2", 124_439_808, 0.48), ("gpt2-xl", 1_557_611_200, 5.8)), start=30
        )
        for variant, factor in (("sealed", 1.02), ("unsealed", 1.0))
    ]  # fmt: skip


def _kernels(draw: random.Random, factor: float) -> list[KernelCase]:
    size, aes = 16 * MIB, "AES-256-GCM"
    shapes = [
        ("seal", aes, size, size, size, 9e-3 * factor),
        ("open", aes, size, size, size, 8.5e-3 * factor),
        ("seal", aes, size, 0, size, 8e-3 * factor),
        ("reduce", "", size, 3 * size, size // 4, 4e-3),
        ("copy", "", size, 2 * size, 0, 3e-3),
        ("matmul", "", MIB, 3 * MIB, 2 * 512**3, 8e-3),
    ]
    return [
        KernelCase(kernel, "cpu", suite, nbytes, 126976, 1, moved, operations, 0, samples(t, draw))  # type: ignore[arg-type]
        for kernel, suite, nbytes, moved, operations, t in shapes
    ]


def _links(draw: random.Random, factor: float) -> list[LinkCase]:
    cases = []
    for transport, variant, alpha, beta in (
        ("shm", "sealed", 4e-5, 0.9e9 / factor),
        ("tcp", "plain", 9e-4, 1.4e9),
        ("tcp", "cc", 1.1e-3, 0.4e9),
    ):
        points = [
            LinkPoint(size // 2, 2, samples(2 * alpha + size / beta, draw))
            for size in (4096, 64 << 10, MIB, 25 * MIB)
        ]
        cases.append(
            LinkCase("all_reduce", transport, variant, "cpu", 1, points, fit(points))  # type: ignore[arg-type]
        )
    return cases


def _allreduce(draw: random.Random, factor: float) -> list[CollectiveCase]:
    return [
        CollectiveCase(
            "all_reduce", 2, 25 * MIB, "float32", "shm" if variant == "sealed" else "tcp",
            variant, "cpu", 0, 0, 2, samples(seconds, draw),  # type: ignore[arg-type]
        )
        for variant, seconds in (("plain", 0.02), ("sealed", 0.03 * factor))
    ]  # fmt: skip


def _steps(draw: random.Random, factor: float) -> list[StepCase]:
    cases, run = [], 3
    for model, ranks, base in (("mlp", 2, 0.1), ("gpt-small", 2, 0.6), ("gpt-small", 4, 1.3)):
        for bucket, buckets in ((1.0, 9), (5.0, 4), (25.0, 2), (100.0, 1)):
            run += 1
            for variant, times in (
                ("plain", 1.0),
                ("sealed", 1.02 * factor),
                ("cc", 1.3 + 0.05 * buckets),
            ):
                seconds = base * (times + 0.005 * buckets * (variant != "plain"))
                cases.append(
                    StepCase(
                        model, 10_834_944, ranks, 2, 512, "fp32", bucket, buckets,
                        "shm" if variant == "sealed" else "tcp", variant, "cpu",  # type: ignore[arg-type]
                        43_339_776, run, samples(seconds, draw),
                        _split(seconds) if variant == "sealed" else [],
                        _timeline(seconds, buckets) if variant == "sealed" else [],
                    )
                )  # fmt: skip
    return cases


def _split(seconds: float) -> list[StepPart]:
    return [
        StepPart("compute", 0.9 * seconds, 0.0),
        StepPart("seal", 0.03 * seconds, 0.05 * seconds),
        StepPart("transfer", 0.01 * seconds, 0.01 * seconds),
        StepPart("open", 0.03 * seconds, 0.05 * seconds),
        StepPart("reduce", 0.01 * seconds, 0.01 * seconds),
        StepPart("wait", 0.02 * seconds, 0.01 * seconds),
    ]


def _timeline(seconds: float, buckets: int) -> list[Span]:
    begin, each = 0.5 * seconds, 0.4 * seconds / buckets
    return [
        Span("compute", "forward", 0.0, 0.3 * seconds, 0),
        Span("compute", "backward", 0.3 * seconds, 0.8 * seconds, 0),
        Span("compute", "optimizer", 0.9 * seconds, seconds, 0),
        *(
            Span("collective", "all_reduce", begin + at * each, begin + (at + 0.9) * each, MIB)
            for at in range(buckets)
        ),
    ]
