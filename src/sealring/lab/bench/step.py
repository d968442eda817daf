"""`sealring bench step`: a training step under DDP, by several variants in turn.

compute   the same step by as many processes, without DDP or communication
plain     DDP over torch's own backend for the device: Gloo, NCCL
sealed    DDP over sealring
cc        DDP over the emulated GPU-TEE path (cc.py), on CPUs

A recorded step is split into computing and communication. DDP starts the last bucket's all-reduce
when the last gradient is computed. Communication after that, or before the backward pass, makes the
model wait: it is exposed. Communication in between is hidden behind the backward pass. If a rank
has only one core for both, hidden communication also costs time: computing takes longer than by
itself.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from sealring.lab.bench import cc
from sealring.lab.bench.gpu import environment_for
from sealring.lab.bench.harness import (
    Comparison,
    Progress,
    Section,
    Timings,
    against_plain,
    in_turn,
    reports_of,
    sealed_world,
)
from sealring.lab.bench.workers import CPU, Report, WorkerPlace, settle
from sealring.lab.results import Span, StepCase, StepPart

if TYPE_CHECKING:
    import torch

    from sealring.lab.bench.cc import CcRing
    from sealring.lab.results import Transport, Variant
    from sealring.observe import CollectiveAccount

PartName = Literal["seal", "transfer", "open", "reduce", "wait"]
PARTS: Final[tuple[PartName, ...]] = ("seal", "transfer", "open", "reduce", "wait")


@dataclass(frozen=True, slots=True)
class Stamps:
    """When the phases of a step ended, in nanoseconds of the monotonic clock."""

    start: int
    forward: int
    backward: int
    end: int


@dataclass(frozen=True, slots=True)
class Ran:
    """One collective of a step, by the same clock."""

    name: str
    bytes: int
    queued: int
    started: int
    ended: int


def ran_in(stamps: Stamps, collectives: Sequence[CollectiveAccount]) -> list[Ran]:
    """The collectives of a step, from a flight record whose times are the monotonic clock's."""
    return [
        Ran(each.operation, each.bytes or 0, each.queued_ns, each.started_ns, each.ended_ns)
        for each in collectives
        if each.started_ns is not None
        and each.ended_ns is not None
        and stamps.start <= each.started_ns
        and each.ended_ns <= stamps.end
    ]


def computed_until(stamps: Stamps, ran: Sequence[Ran]) -> int:
    """The time when the last gradient was computed."""
    queued = [each.queued for each in ran if stamps.forward <= each.queued <= stamps.backward]
    return max(queued, default=stamps.backward)


def exposed_ns(stamps: Stamps, ran: Sequence[Ran]) -> int:
    until = computed_until(stamps, ran)
    total = 0
    for each in ran:
        hidden = min(each.ended, until) - max(each.started, stamps.forward)
        total += (each.ended - each.started) - max(0, hidden)
    return total


def parts_of(
    stamps: Stamps, ran: Sequence[Ran], spent: Mapping[PartName, float] | None
) -> list[StepPart]:
    """Splits a step. The flight record says how much of the collectives was exposed, and `spent`
    what their time was used for; each use is assumed to have the same exposed share. Without
    `spent` the collectives are one part."""
    exposed = exposed_ns(stamps, ran) * 1e-9
    busy = sum(each.ended - each.started for each in ran) * 1e-9
    share = exposed / busy if busy else 0.0
    parts: Mapping[PartName, float] = {"transfer": busy} if spent is None else spent
    computed = (stamps.end - stamps.start) * 1e-9 - share * sum(parts.values())
    return [
        StepPart("compute", max(0.0, computed), 0.0),
        *(StepPart(name, share * took, (1 - share) * took) for name, took in parts.items()),
    ]


def spans_of(stamps: Stamps, ran: Sequence[Ran]) -> list[Span]:
    def span(lane: Literal["compute", "collective"], name: str, *times: int, size: int = 0) -> Span:
        start, end = ((each - stamps.start) * 1e-9 for each in times)
        return Span(lane, name, start, end, size)

    return [
        span("compute", "forward", stamps.start, stamps.forward),
        span("compute", "backward", stamps.forward, computed_until(stamps, ran)),
        span("compute", "optimizer", stamps.backward, stamps.end),
        *(span("collective", each.name, each.started, each.ended, size=each.bytes) for each in ran),
    ]


def profiled(step: Callable[[], object], path: Path) -> None:
    """Runs the step under torch's profiler, which writes a Chrome trace of all threads."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile, supported_activities

    possible = supported_activities()  # type: ignore[no-untyped-call]
    wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & possible
    # Collectives run on the group's thread, which a profiler leaves out by default.
    all_threads = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=list(wanted), experimental_config=all_threads) as profiler:
        step()
    profiler.export_chrome_trace(str(path))


# ---- training one model with one variant, and recording its steps


_RECORDED: Final = 3
"""Steps that are recorded after the timed steps; the one of median length is kept."""
_PHASED: Final = 7
"""Steps without communication that give the lengths of the phases."""


Precision = Literal["fp32", "bf16"]
WIDTHS: Final[dict[Precision, int]] = {"fp32": 4, "bf16": 2}
_COPIES: Final = 5
"""Copies of the parameters in one trainee: weights, gradients, buckets, and AdamW's two moments."""


def count_of(model: str) -> int:
    """The number of a model's parameters; needs no memory for them."""
    import torch

    from sealring.lab.bench.models import build

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(model).parameters())


def training_bytes(model: str, precision: Precision) -> int:
    """The memory of one trainee, without activations."""
    return _COPIES * count_of(model) * WIDTHS[precision]


@dataclass(frozen=True, slots=True)
class StepSetting:
    model: str
    batch: int
    precision: Precision
    bucket_cap_mb: float


@dataclass(frozen=True, slots=True)
class RecordedStep:
    split: list[StepPart]
    timeline: list[Span]
    all_reduces: int
    sealed_bytes: int


class BenchTrainee:
    def __init__(
        self,
        variant: str,
        setting: StepSetting,
        *,
        rank: int,
        device: torch.device,
        sealed: Any,
        plain: Any = None,
        ring: CcRing | None = None,
    ) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        from sealring.lab.bench.models import build, find

        self._variant, self._group, self._ring = variant, sealed, ring
        self._device, self._on_gpu = device, device.type == "cuda"
        workload = find(setting.model)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[setting.precision]
        with device:
            model = build(setting.model).to(dtype)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.tokens = setting.batch * workload.tokens
        inputs, targets = workload.draw(setting.batch, torch.Generator().manual_seed(rank))
        self._inputs = inputs.to(device, dtype if inputs.is_floating_point() else inputs.dtype)
        self._targets = targets.to(device)
        self._model = model
        if variant != "compute":
            wrapped = DistributedDataParallel(
                model,
                process_group=sealed if variant == "sealed" else plain,
                bucket_cap_mb=setting.bucket_cap_mb,
            )
            if variant == "cc":
                # A lambda: DDP compares annotations with its own types, and these are strings.
                wrapped.register_comm_hook(ring, lambda ring, bucket: ring.average(bucket))
            self._model = wrapped
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self._stamps: list[Stamps] = []

    def step(self, *, phased: bool = False) -> None:
        """Does one step to its end. A GPU computes asynchronously, so with `phased` this waits for
        it after each phase, and the stamps are the ends of the phases."""
        import torch

        def now(wait: bool = phased) -> int:
            if wait:
                settle(self._device)
            return time.monotonic_ns()

        start = now()
        loss = self._model(self._inputs, self._targets)
        self._optimizer.zero_grad()
        forward = now()
        with torch.profiler.record_function("backward"):
            loss.backward()
        backward = now()
        self._optimizer.step()
        self._stamps.append(Stamps(start, forward, backward, now(wait=True)))

    def recorded(self) -> RecordedStep:
        """Trains some more steps and records them; all ranks call it."""
        if self._variant == "compute":
            # On a CPU, the stamps of the timed steps are already correct.
            for _ in range(_PHASED if self._on_gpu else 0):
                self.step(phased=True)
            return RecordedStep(_phases(self._stamps[-_PHASED:]), [], 0, 0)
        steps = sorted((self._record() for _ in range(_RECORDED)), key=lambda each: each[0])
        return steps[_RECORDED // 2][1]

    def _record(self) -> tuple[int, RecordedStep]:
        before, spent = self._group.account(), dict(self._ring.spent_s) if self._ring else {}
        reduced = self._ring.all_reduces if self._ring else 0
        self.step(phased=True)
        stamps = self._stamps[-1]
        length = stamps.end - stamps.start
        if self._variant == "sealed":
            after = self._group.account()
            ran = ran_in(stamps, self._group.recorder.account(since_1970_ns=0).collectives)
            # On a GPU the engine's account covers only the thread that launches kernels.
            took = {name: after[f"{name}_s"] - before[f"{name}_s"] for name in PARTS}
            split = parts_of(stamps, ran, None if self._on_gpu else took)
            return length, RecordedStep(
                split=split,
                timeline=spans_of(stamps, ran),
                all_reduces=sum(each.name == "all_reduce" for each in ran),
                sealed_bytes=after["sealed_bytes"] - before["sealed_bytes"],
            )
        if self._ring is not None and self._variant == "cc":
            waited = {name: now - spent[name] for name, now in self._ring.spent_s.items()}
            computed = max(0.0, length * 1e-9 - sum(waited.values()))
            split = [StepPart("compute", computed, 0.0)]
            split += [StepPart(name, waited[name], 0.0) for name in PARTS if name in waited]
            return length, RecordedStep(split, [], self._ring.all_reduces - reduced, 0)
        return length, RecordedStep([], [], 0, 0)


def _phases(steps: list[Stamps]) -> list[StepPart]:
    return [
        StepPart("forward", median(each.forward - each.start for each in steps) * 1e-9, 0.0),
        StepPart("backward", median(each.backward - each.forward for each in steps) * 1e-9, 0.0),
        StepPart("optimizer", median(each.end - each.backward for each in steps) * 1e-9, 0.0),
    ]


# ---- a world of workers


_WARM_UP = 3
"""DDP rebuilds its buckets after the first step, and allocators reach a steady state."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one world of workers measures."""

    ranks: int
    settings: tuple[StepSetting, ...]
    variants: tuple[str, ...] = ("plain", "sealed", "cc")
    steps: int = 11
    transport: str = "shm"
    trace: Path | None = None
    """The file for a Chrome trace of one sealed step of the last setting on rank 0."""
    place: WorkerPlace = CPU
    wire: str = "auto"
    """The wire of sealed tensors on a GPU."""

    @property
    def sealed_transport(self) -> str:
        """The transport's name in results."""
        if self.place.kind == "cpu":
            return self.transport
        return "gpu" if self.wire == "auto" else self.wire

    def environment(self) -> dict[str, str]:
        environment = {"SEALRING_TRANSPORT": self.transport}
        if self.place.kind == "cuda":
            environment |= {"SEALRING_GPU_WIRE": self.wire, **environment_for(self.wire)}
        return environment


@dataclass(frozen=True, slots=True)
class StepRun:
    """One setting, trained by all variants in one run."""

    setting: StepSetting
    ranks: int
    parameters: int
    tokens: int
    place: WorkerPlace
    transport: str
    """The transport of the sealed variant."""
    samples: dict[str, Timings]
    recorded: dict[str, RecordedStep]
    section: Section = "step"

    @property
    def label(self) -> str:
        bucket = f", {self.setting.bucket_cap_mb:g} MB buckets" if self.ranks > 1 else ""
        return f"{self.setting.model}, {self.ranks} ranks{bucket}"

    def against_plain(self, variant: str = "sealed") -> Comparison | None:
        return against_plain(self.samples, variant)

    def overlap(self) -> float | None:
        """The part of the sealed collectives' time that ran while backward computed."""
        sealed = self.recorded.get("sealed")
        if sealed is None:
            return None
        hidden = sum(part.hidden_s for part in sealed.split)
        exposed = sum(part.exposed_s for part in sealed.split if part.name != "compute")
        return hidden / (hidden + exposed) if hidden + exposed else 0.0

    @property
    def cases(self) -> list[StepCase]:
        return [self._case(variant) for variant in self.samples]

    def _case(self, variant: str) -> StepCase:
        recorded = self.recorded[variant]
        alone = variant == "compute"
        plain = "nccl" if self.place.kind == "cuda" else "tcp"
        transport = {"compute": "none", "sealed": self.transport}.get(variant, plain)
        # All variants have the same buckets; torch's backends do not count them.
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
            run=0,
            seconds=list(self.samples[variant].seconds),
            split=recorded.split,
            timeline=recorded.timeline,
        )


def measure_steps(work: Work, progress: Progress | None = None) -> Iterator[StepRun]:
    return reports_of(work.ranks, _worker, work, environment=work.environment(), progress=progress)


def row(step: StepRun) -> dict[str, Any]:
    """One case as JSON; ratios are None if they would be noise."""
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
    device = work.place.enter(rank, work.ranks)
    with sealed_world() if work.ranks > 1 else nullcontext() as group:
        plain = group and dist_group(work.place.backend)
        ring = cc.make_ring(plain) if "cc" in work.variants and group else None
        for setting in work.settings:
            trainees = {
                variant: BenchTrainee(
                    variant,
                    setting,
                    rank=rank,
                    device=device,
                    sealed=group,
                    plain=plain,
                    ring=ring,
                )
                for variant in work.variants
            }
            steps = {variant: trainee.step for variant, trainee in trainees.items()}
            samples = in_turn(steps, report, blocks=work.steps, warm_up=_WARM_UP)
            recorded = {variant: trainee.recorded() for variant, trainee in trainees.items()}
            first = next(iter(trainees.values()))
            if rank == 0:
                measured = StepRun(
                    setting, work.ranks, first.parameters, first.tokens, work.place,
                    work.sealed_transport, samples, recorded,
                )  # fmt: skip
                report(measured)
            if work.trace is not None and setting is work.settings[-1]:
                if rank == 0:
                    profiled(trainees["sealed"].step, work.trace)
                else:
                    trainees["sealed"].step()
            # DDP is part of a reference cycle. Without this, these trainees would keep their
            # memory.
            del first
            steps.clear()
            trainees.clear()
            gc.collect()


def dist_group(backend: str) -> Any:
    import torch.distributed as dist

    return dist.new_group(backend=backend)
