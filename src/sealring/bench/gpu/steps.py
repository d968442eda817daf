"""A DDP step of GPT-2 by several ranks on one GPU, over one wire: sealed, and the same unsealed.

One model with one DDP serves both, because four ranks of the largest would not fit twice: a
communication hook hands each step's buckets to the group whose turn it is. Plain SGD, which keeps
nothing but weights and gradients; torch's default buckets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from sealring.bench.exchange import Progress
from sealring.bench.gpu.groups import environment_for, sealed_over, unsealed_over
from sealring.bench.measure import Samples, alternate, of_slowest
from sealring.bench.place import Place, settle
from sealring.bench.workers import Report, run_workers
from sealring.results import StepCase

if TYPE_CHECKING:
    from sealring.results.schema import Transport, Variant

MODELS: Final = ("gpt2", "gpt2-medium", "gpt2-xl")
TOKENS: Final = 1024
BUCKET_MB: Final = 25.0
"""DDP's default, which is not given to it: so that its first bucket is small, as by default."""
BUDGET_S: Final = 60.0
_FEWEST, _MOST = 5, 11


def batch_of(parameters: int) -> int:
    """Windows a rank: what lets four ranks of the largest fit into one GPU."""
    return 4 if parameters < 1_000_000_000 else 1


def affordable(step_s: float, variants: int, most: int = _MOST) -> int:
    """How many steps of each variant fit into the budget; never too few for a median."""
    return min(most, max(_FEWEST, int(BUDGET_S / (variants * step_s))))


@dataclass(frozen=True, slots=True)
class GpuStep:
    section: Literal["step"]
    device: str
    model: str
    parameters: int
    ranks: int
    batch: int
    wire: str
    all_reduces: int
    sealed_bytes: int
    samples: dict[str, Samples]
    """Of the slowest rank, by variant."""

    @property
    def label(self) -> str:
        return f"{self.model}, {self.ranks} ranks on one GPU, over {self.wire}"

    def cases(self, run: int) -> list[StepCase]:
        return [
            StepCase(
                model=self.model,
                parameters=self.parameters,
                ranks=self.ranks,
                batch=self.batch,
                tokens=self.batch * TOKENS,
                precision="fp32",
                bucket_cap_mb=BUCKET_MB,
                all_reduces=self.all_reduces,
                transport=cast("Transport", self.wire),
                variant=cast("Variant", variant),
                device=self.device,
                sealed_bytes=self.sealed_bytes if variant == "sealed" else 0,
                run=run,
                seconds=list(samples.seconds),
                split=[],
            )
            for variant, samples in self.samples.items()
        ]


def measure_step(
    place: Place,
    model: str,
    ranks: int,
    wire: str,
    most: int = _MOST,
    progress: Progress | None = None,
) -> Iterator[GpuStep]:
    arguments = (place, model, ranks, wire, most)
    for _, report in run_workers(ranks, _worker, *arguments, environment=environment_for(wire)):
        if isinstance(report, GpuStep):
            yield report
        elif progress is not None:
            progress(report)


# ---- in the workers


@dataclass(slots=True)
class _Turn:
    """Whose turn it is to reduce, and how many buckets it was given."""

    group: Any
    buckets: int = 0


def _worker(
    rank: int, report: Report, place: Place, name: str, ranks: int, wire: str, most: int
) -> None:
    import torch
    import torch.distributed as dist

    device = place.enter(rank, ranks)
    dist.init_process_group("sealring")
    groups = {"sealed": sealed_over(wire, device), "unsealed": unsealed_over(wire, device)}
    turn = _Turn(groups["sealed"])
    step, parameters, batch = _training(name, turn, device)

    def by(group: Any) -> Callable[[], None]:
        def call() -> None:
            turn.group = group
            step()

        return call

    calls = {variant: by(group) for variant, group in groups.items()}
    for call in calls.values():  # DDP lays out its buckets anew after the first step
        call()
    before, turn.buckets = groups["sealed"].account()["sealed_bytes"], 0
    start = time.perf_counter()
    calls["sealed"]()
    took = torch.tensor([time.perf_counter() - start])
    sealed_bytes, buckets = groups["sealed"].account()["sealed_bytes"] - before, turn.buckets
    dist.all_reduce(took, dist.ReduceOp.MAX)
    blocks = affordable(float(took), len(calls), most)
    samples = alternate(
        calls,
        blocks=blocks,
        calls=1,
        warm_up=0,
        between=dist.barrier,
        after_block=(lambda block: report((block + 1) / blocks)) if rank == 0 else None,
    )
    everyones: list[Any] = [None] * ranks
    dist.all_gather_object(everyones, samples)
    if rank == 0:
        report(
            GpuStep(
                section="step",
                device=place.name,
                model=name,
                parameters=parameters,
                ranks=ranks,
                batch=batch,
                wire=wire,
                all_reduces=buckets,
                sealed_bytes=sealed_bytes,
                samples=of_slowest(everyones),
            )
        )
    dist.barrier()
    dist.destroy_process_group()


def _training(name: str, turn: _Turn, device: Any) -> tuple[Callable[[], None], int, int]:
    """One step as a call; the model is made where it is trained, with no copy on the host."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    from sealring.bench.models import build

    with device:
        model: Any = build(name)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    batch = batch_of(parameters)
    shape = (batch, min(TOKENS, model.positions.num_embeddings) + 1)
    windows = torch.randint(model.tokens.num_embeddings, shape, device=device)
    wrapped = DistributedDataParallel(model, process_group=turn.group, gradient_as_bucket_view=True)

    def reduce(turn: Any, bucket: Any) -> Any:
        turn.buckets += 1
        return allreduce_hook(turn.group, bucket)

    # A lambda: DDP compares annotations with its own types, and these are strings.
    wrapped.register_comm_hook(turn, lambda turn, bucket: reduce(turn, bucket))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        wrapped(windows[:, :-1], windows[:, 1:]).backward()
        optimizer.step()
        settle(device)

    return step, parameters, batch
