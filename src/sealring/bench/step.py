"""`sealring bench step`: a DDP training step over sealed links, against plaintext Gloo."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sealring.bench.measure import Samples, alternate
from sealring.bench.workers import Report, run_workers

_WARM_UP = 3
"""DDP lays out its buckets anew after the first step, and allocators settle."""


@dataclass(frozen=True, slots=True)
class Result:
    model: str
    parameters: int
    tokens: int
    """Per rank and step."""
    ranks: int
    sealed_ms: float
    gloo_ms: float
    ratio: float
    sealed_bytes: int
    """Plaintext that rank 0 sealed for one step."""
    overlap: float
    """The part of a step's sealed collectives, by time, that ran while backward computed."""
    sealed_spread: float
    gloo_spread: float
    steps: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_step(
    model: str,
    ranks: int,
    *,
    steps: int = 11,
    trace: Path | None = None,
    progress: Callable[[float], None] | None = None,
) -> Result:
    """Medians over `steps` steps of each; `trace` gets rank 0's timeline of one sealed step."""
    result: Result | None = None
    for _, report in run_workers(ranks, _worker, model, ranks, steps, trace):
        if isinstance(report, Result):
            result = report
        elif progress is not None:
            progress(report)
    if result is None:
        raise RuntimeError("the workers ended without a result")
    return result


def _worker(
    rank: int, report: Report, name: str, ranks: int, steps: int, trace: Path | None
) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from sealring.bench.models import MODELS, make_model
    from sealring.bench.timeline import overlap_with_backward, recorded

    dist.init_process_group("sealring")
    sealed_group: Any = dist.group.WORLD
    gloo = dist.new_group(backend="gloo")
    load = MODELS[name]
    model = make_model(load.shape, seed=0)
    windows = torch.randint(
        load.shape.vocabulary,
        (load.batch, load.shape.context + 1),
        generator=torch.Generator().manual_seed(rank),
    )

    def trainee(module: torch.nn.Module, group: dist.ProcessGroup) -> Callable[[], None]:
        wrapped = DistributedDataParallel(module, process_group=group)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

        def step() -> None:
            loss = wrapped(windows[:, :-1], windows[:, 1:])
            optimizer.zero_grad()
            with torch.profiler.record_function("backward"):
                loss.backward()
            optimizer.step()

        return step

    sealed_step = trainee(model, sealed_group)
    samples = alternate(
        {"sealed": sealed_step, "gloo": trainee(copy.deepcopy(model), gloo)},
        blocks=steps,
        calls=1,
        warm_up=_WARM_UP,
        between=dist.barrier,
        after_block=(lambda block: report((block + 1) / steps)) if rank == 0 else None,
    )
    # Recording costs time, so it comes after the timed steps.
    dist.barrier()
    before = sealed_group.account()["sealed_bytes"]
    if rank == 0:
        events = recorded(sealed_step, trace)
        sealed_bytes = sealed_group.account()["sealed_bytes"] - before
        report(
            Result(
                model=name,
                parameters=sum(parameter.numel() for parameter in model.parameters()),
                tokens=load.batch * load.shape.context,
                ranks=ranks,
                **_times(samples),
                sealed_bytes=sealed_bytes,
                overlap=round(overlap_with_backward(events), 4),
                steps=steps,
            )
        )
    else:
        sealed_step()
    dist.barrier()
    dist.destroy_process_group()


def _times(samples: dict[str, Samples]) -> dict[str, float]:
    sealed, gloo = samples["sealed"], samples["gloo"]
    return {
        "sealed_ms": round(sealed.median * 1e3, 2),
        "gloo_ms": round(gloo.median * 1e3, 2),
        "ratio": round(sealed.median / gloo.median, 4),
        "sealed_spread": round(sealed.spread, 4),
        "gloo_spread": round(gloo.spread, 4),
    }
