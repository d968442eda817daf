"""`sealring bench allreduce`: sealed all-reduce against torch's plaintext Gloo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from sealring import limits
from sealring.bench.measure import Samples, alternate
from sealring.bench.workers import Report, run_workers


@dataclass(frozen=True, slots=True)
class Result:
    ranks: int
    bytes: int
    transport: str
    suite: str
    sealed_us: float
    gloo_us: float
    ratio: float
    sealed_bytes: int
    """Plaintext that rank 0 sealed for one all-reduce."""
    memory_bytes_per_link: int
    """Beyond the user's tensors, on rank 0."""
    sealed_spread: float
    gloo_spread: float
    blocks: int
    calls: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_allreduce(
    ranks: int,
    size: int,
    transport: str,
    *,
    blocks: int = 15,
    progress: Callable[[float], None] | None = None,
) -> Result:
    # Blocks of a tenth of a second or more: long enough to outlast a scheduler's whim.
    calls = max(3, min(50, (32 << 20) // (size * ranks)))
    result: Result | None = None
    environment = {"SEALRING_TRANSPORT": transport}
    for _, report in run_workers(
        ranks, _worker, ranks, size, transport, blocks, calls, environment=environment
    ):
        if isinstance(report, Result):
            result = report
        elif progress is not None:
            progress(report)
    if result is None:
        raise RuntimeError("the workers ended without a result")
    return result


def _worker(
    rank: int, report: Report, ranks: int, size: int, transport: str, blocks: int, calls: int
) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("sealring")
    gloo = dist.new_group(backend="gloo")
    sealed_group: Any = dist.group.WORLD
    tensor = torch.zeros(size // 4, dtype=torch.float32)
    before = sealed_group.account()["sealed_bytes"]
    dist.all_reduce(tensor)
    sealed_bytes = sealed_group.account()["sealed_bytes"] - before
    samples = alternate(
        {
            "sealed": lambda: dist.all_reduce(tensor),
            "gloo": lambda: dist.all_reduce(tensor, group=gloo),
        },
        blocks=blocks,
        calls=calls,
        warm_up=3,
        between=dist.barrier,
        after_block=(lambda block: report((block + 1) / blocks)) if rank == 0 else None,
    )
    if rank == 0:
        account = sealed_group.account()
        report(_result(ranks, size, transport, samples, sealed_bytes, account, blocks, calls))
    dist.barrier()
    dist.destroy_process_group()


def _result(
    ranks: int,
    size: int,
    transport: str,
    samples: dict[str, Samples],
    sealed_bytes: int,
    account: Any,
    blocks: int,
    calls: int,
) -> Result:
    sealed, gloo = samples["sealed"], samples["gloo"]
    return Result(
        ranks=ranks,
        bytes=size,
        transport=transport,
        suite=limits.SUITE,
        sealed_us=round(sealed.median * 1e6, 1),
        gloo_us=round(gloo.median * 1e6, 1),
        ratio=round(sealed.median / gloo.median, 4),
        sealed_bytes=sealed_bytes,
        memory_bytes_per_link=account["memory_bytes"] // max(1, ranks - 1),
        sealed_spread=round(sealed.spread, 4),
        gloo_spread=round(gloo.spread, 4),
        blocks=blocks,
        calls=calls,
    )
