"""Results in the form of a bench run, with made-up times."""

from __future__ import annotations

from sealring.lab.results import (
    CollectiveCase,
    Fit,
    KernelCase,
    LinkCase,
    LinkPoint,
    Machine,
    Results,
    ScaleCase,
    Span,
    StepCase,
    StepPart,
)

MACHINE = Machine(
    architecture="aarch64",
    cpu="Arm Neoverse-N1",
    cores=2,
    features=["aes", "pmull"],
    memory_bytes=8 << 30,
    gpus=[],
    gpu_memory_bytes=0,
    system="Linux 6.1",
    python="3.11.9",
    torch="2.13.0",
    openssl="OpenSSL 3.0.15",
    sealring="0.1.0",
)


def results() -> Results:
    return Results(
        command="sealring bench all --quick",
        made="2026-11-15T08:00:00Z",
        complete=True,
        stopped=None,
        machine=MACHINE,
        aead=[
            KernelCase(
                "seal", "cpu", "AES-256-GCM", 1 << 20, 126976, 1, 2 << 20, 0, 0, [5e-4, 5.1e-4]
            )
        ],
        link=[
            LinkCase(
                "all_reduce",
                "shm",
                "sealed",
                "cpu",
                1,
                [LinkPoint(4096, 2, [8e-5, 9e-5]), LinkPoint(1 << 20, 2, [1.2e-3])],
                Fit(3e-5, 2e-5, 4e-5, 1e9, 0.9e9, 1.1e9, 0.05),
            )
        ],
        allreduce=[
            CollectiveCase(
                "all_reduce", 2, 4096, "float32", "shm", "plain", "cpu", 0, 0, 2, [2e-3, 2.1e-3]
            )
        ],
        scale=[ScaleCase(16, "world", 15, 0, 46, 100_000, 0.4, 0.02, 0.004, 300_000_000)],
        step=[
            StepCase(
                "gpt-small", 10_834_944, 2, 2, 512, "fp32", 25.0, 2, "shm", "sealed", "cpu",
                43_339_776, 3, [0.7, 0.72, 0.71], [StepPart("seal", 0.01, 0.02)],
                [Span("collective", "all_reduce", 0.2, 0.3, 1 << 20)],
            )
        ],
    )  # fmt: skip
