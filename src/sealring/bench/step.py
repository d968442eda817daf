"""`sealring bench step`: a training step under DDP, by several variants in turn.

compute   the same step by as many processes, without DDP and without communication
plain     DDP over torch's own backend for the device: Gloo, NCCL
sealed    DDP over sealring
cc        DDP over the emulated GPU-TEE path (cc.py), on CPUs
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from sealring.bench import cc
from sealring.bench.exchange import Progress
from sealring.bench.gpu.groups import environment_for
from sealring.bench.measure import Samples, alternate, of_slowest
from sealring.bench.noise import Comparison, compare
from sealring.bench.place import CPU, Place
from sealring.bench.timeline import profiled
from sealring.bench.trainee import Precision, Recorded, Trainee
from sealring.bench.workers import Report, run_workers
from sealring.results import StepCase

if TYPE_CHECKING:
    from sealring.results.schema import Transport, Variant

_WARM_UP = 3
"""DDP lays out its buckets anew after the first step, and allocators settle."""


@dataclass(frozen=True, slots=True)
class Setting:
    model: str
    batch: int
    precision: Precision
    bucket_cap_mb: float


@dataclass(frozen=True, slots=True)
class Work:
    """What one world of workers measures."""

    ranks: int
    settings: tuple[Setting, ...]
    variants: tuple[str, ...] = ("plain", "sealed", "cc")
    steps: int = 11
    transport: str = "shm"
    cc_path: cc.Path = field(default_factory=cc.Path)
    trace: Path | None = None
    """Gets a Chrome trace of one sealed step of the last setting on rank 0."""
    place: Place = CPU
    wire: str = "auto"
    """Of sealed tensors on a GPU."""

    @property
    def sealed_transport(self) -> str:
        """As results call it."""
        if self.place.kind == "cpu":
            return self.transport
        return "gpu" if self.wire == "auto" else self.wire

    def environment(self) -> dict[str, str]:
        environment = {"SEALRING_TRANSPORT": self.transport}
        if self.place.kind == "cuda":
            environment |= {"SEALRING_GPU_WIRE": self.wire, **environment_for(self.wire)}
        return environment


@dataclass(frozen=True, slots=True)
class Step:
    """One setting, as all variants trained it in one run."""

    section: Literal["step"]
    setting: Setting
    ranks: int
    parameters: int
    tokens: int
    place: Place
    transport: str
    """Of the sealed variant."""
    samples: dict[str, Samples]
    recorded: dict[str, Recorded]

    @property
    def label(self) -> str:
        bucket = f", {self.setting.bucket_cap_mb:g} MB buckets" if self.ranks > 1 else ""
        return f"{self.setting.model}, {self.ranks} ranks{bucket}"

    def against_plain(self, variant: str = "sealed") -> Comparison | None:
        plain, one = self.samples.get("plain"), self.samples.get(variant)
        return compare(one.seconds, plain.seconds) if plain and one else None

    def overlap(self) -> float | None:
        """The part of a step's sealed collectives, by time, that ran while backward computed."""
        sealed = self.recorded.get("sealed")
        if sealed is None:
            return None
        hidden = sum(part.hidden_s for part in sealed.split)
        exposed = sum(part.exposed_s for part in sealed.split if part.name != "compute")
        return hidden / (hidden + exposed) if hidden + exposed else 0.0

    def cases(self, run: int) -> list[StepCase]:
        return [self._case(variant, run) for variant in self.samples]

    def _case(self, variant: str, run: int) -> StepCase:
        recorded = self.recorded[variant]
        alone = variant == "compute"
        plain = "nccl" if self.place.kind == "cuda" else "tcp"
        transport = {"compute": "none", "sealed": self.transport}.get(variant, plain)
        # The buckets are laid out alike by every variant; torch's backends do not count them.
        buckets = 0 if alone else self.recorded["sealed"].all_reduces
        return StepCase(
            model=self.setting.model,
            parameters=self.parameters,
            ranks=self.ranks,
            batch=self.setting.batch,
            tokens=self.tokens,
            precision=self.setting.precision,
            bucket_cap_mb=0.0 if alone else float(self.setting.bucket_cap_mb),
            all_reduces=buckets,
            transport=cast("Transport", transport),
            variant=cast("Variant", variant),
            device=self.place.name,
            sealed_bytes=recorded.sealed_bytes,
            run=run,
            seconds=list(self.samples[variant].seconds),
            split=recorded.split,
            timeline=recorded.timeline,
        )


def measure_steps(work: Work, progress: Progress | None = None) -> Iterator[Step]:
    for _, report in run_workers(work.ranks, _worker, work, environment=work.environment()):
        if isinstance(report, Step):
            yield report
        elif progress is not None:
            progress(report)


def row(step: Step) -> dict[str, Any]:
    """One case as JSON; the ratios are None where they would be noise."""
    times = {
        name: step.samples.get(variant)
        for name, variant in (("sealed", "sealed"), (step.place.backend, "plain"), ("cc", "cc"))
    }
    compared, emulated = step.against_plain(), step.against_plain("cc")
    told = {"ratio": compared, "cc_ratio": emulated}
    return {
        "model": step.setting.model,
        "parameters": step.parameters,
        "batch": step.setting.batch,
        "tokens": step.tokens,
        "precision": step.setting.precision,
        "bucket_cap_mb": step.setting.bucket_cap_mb,
        "ranks": step.ranks,
        **{f"{name}_ms": each and round(each.median * 1e3, 2) for name, each in times.items()},
        **{name: each and each.told and round(each.told, 4) for name, each in told.items()},
        "noise": compared and round(compared.noise, 4),
        "sealed_bytes": step.recorded["sealed"].sealed_bytes,
        "all_reduces": step.recorded["sealed"].all_reduces,
        "overlap": round(step.overlap() or 0.0, 4),
        **{f"{name}_spread": each and round(each.spread, 4) for name, each in times.items()},
        "steps": len(step.samples["sealed"].seconds),
    }


# ---- in the workers


def _worker(rank: int, report: Report, work: Work) -> None:
    import torch.distributed as dist

    alone = work.ranks == 1
    device = work.place.enter(rank, work.ranks)
    plain: Any = None
    if not alone:
        dist.init_process_group("sealring")
        plain = dist.new_group(backend=work.place.backend)
    ring = cc.make_ring(plain, work.cc_path) if "cc" in work.variants and not alone else None
    for setting in work.settings:
        trainees = {
            variant: Trainee(
                variant,
                setting.model,
                setting.batch,
                setting.precision,
                setting.bucket_cap_mb,
                rank=rank,
                device=device,
                sealed=dist.group.WORLD if not alone else None,
                plain=plain,
                ring=ring,
            )
            for variant in work.variants
        }
        samples = alternate(
            {variant: trainee.step for variant, trainee in trainees.items()},
            blocks=work.steps,
            calls=1,
            warm_up=_WARM_UP,
            between=(lambda: None) if alone else dist.barrier,
            after_block=(lambda block: report((block + 1) / work.steps)) if rank == 0 else None,
        )
        recorded = {variant: trainee.recorded() for variant, trainee in trainees.items()}
        everyones: list[Any] = [samples]
        if not alone:
            everyones = [None] * work.ranks
            dist.all_gather_object(everyones, samples)
        if rank == 0:
            first = next(iter(trainees.values()))
            report(
                Step(
                    section="step",
                    setting=setting,
                    ranks=work.ranks,
                    parameters=first.parameters,
                    tokens=first.tokens,
                    place=work.place,
                    transport=work.sealed_transport,
                    samples=of_slowest(everyones),
                    recorded=recorded,
                )
            )
        if work.trace is not None and setting is work.settings[-1]:
            if rank == 0:
                profiled(trainees["sealed"].step, work.trace)
            else:
                trainees["sealed"].step()
        # DDP is part of a cycle: without this the next trainees would come on top of these.
        trainees.clear()
        gc.collect()
    if not alone:
        dist.barrier()
        dist.destroy_process_group()
