"""All-reduces by several ranks on one GPU, by every way there is, in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from sealring.bench.exchange import Progress
from sealring.bench.gpu.groups import environment_for, sealed_over, unsealed_over
from sealring.bench.measure import Samples, alternate, of_slowest
from sealring.bench.place import Place, settle
from sealring.bench.workers import Report, run_workers
from sealring.errors import WorkerFailed
from sealring.results import CollectiveCase

if TYPE_CHECKING:
    from sealring.results.schema import Transport, Variant

BYTES: Final = 256 << 20

Way = tuple["Variant", "Transport"]


def ways_over(wires: Sequence[str]) -> list[Way]:
    """Sealed over each wire, and what it is to be compared with: through host memory the same path
    unsealed and Gloo, which takes that way too; between two hosts the same path unsealed; else
    NCCL."""
    ways: list[Way] = []
    if "host" in wires:
        ways += [("sealed", "host"), ("unsealed", "host"), ("plain", "tcp")]
    if "peer" in wires:
        ways.append(("sealed", "peer"))
    if "nccl" in wires:
        ways.append(("sealed", "nccl"))
    if "hosts" in wires:
        ways += [("sealed", "hosts"), ("unsealed", "hosts")]
    if "peer" in wires or "nccl" in wires:
        ways.append(("plain", "nccl"))
    return ways


@dataclass(frozen=True, slots=True)
class GpuExchange:
    """One size by one number of ranks, as all ways did it in one run."""

    section: Literal["allreduce"]
    device: str
    ranks: int
    bytes: int
    samples: dict[Way, Samples]
    """Of the slowest rank."""
    rank_bytes: dict[Way, tuple[int, int]]
    """Plaintext that the busiest rank sealed and opened in one call."""

    @property
    def label(self) -> str:
        return f"all_reduce, {self.ranks} ranks on one GPU"

    def cases(self, run: int) -> list[CollectiveCase]:
        return [
            CollectiveCase(
                collective="all_reduce",
                ranks=self.ranks,
                bytes=self.bytes,
                dtype="float32",
                transport=transport,
                variant=variant,
                device=self.device,
                sealed_bytes=self.rank_bytes.get((variant, transport), (0, 0))[0],
                opened_bytes=self.rank_bytes.get((variant, transport), (0, 0))[1],
                run=run,
                seconds=list(samples.seconds),
            )
            for (variant, transport), samples in self.samples.items()
        ]


def measure_allreduces(
    place: Place,
    ranks: int,
    size: int,
    wires: Sequence[str],
    blocks: int,
    progress: Progress | None = None,
) -> Iterator[GpuExchange]:
    ways = ways_over(wires)
    arguments = (place, ranks, size, ways, blocks)
    for _, report in run_workers(ranks, _worker, *arguments, environment=environment_for(*wires)):
        if isinstance(report, GpuExchange):
            yield report
        elif progress is not None:
            progress(report)


# ---- in the workers


def _worker(
    rank: int, report: Report, place: Place, ranks: int, size: int, ways: list[Way], blocks: int
) -> None:
    import torch
    import torch.distributed as dist

    device = place.enter(rank, ranks)
    dist.init_process_group("sealring")
    groups = {way: _group(way, device) for way in ways}
    tensor = torch.empty(size // 4, device=device)
    calls = {way: _bound(tensor, group) for way, group in groups.items()}
    for way, call in calls.items():
        _check_sum(way, call, tensor, rank, ranks)
    rank_bytes = {
        way: _sealed_and_opened(groups[way], call)
        for way, call in calls.items()
        if way[0] == "sealed"
    }
    tensor.zero_()
    samples = alternate(
        calls,
        blocks=blocks,
        calls=1,
        warm_up=1,
        between=dist.barrier,
        after_block=(lambda block: report((block + 1) / blocks)) if rank == 0 else None,
    )
    everyones: list[Any] = [None] * ranks
    dist.all_gather_object(everyones, (samples, rank_bytes))
    if rank == 0:
        report(
            GpuExchange(
                section="allreduce",
                device=place.name,
                ranks=ranks,
                bytes=size,
                samples=of_slowest([samples for samples, _ in everyones]),
                rank_bytes={
                    way: max((own[way] for _, own in everyones), key=sum) for way in rank_bytes
                },
            )
        )
    dist.barrier()
    dist.destroy_process_group()


def _group(way: Way, device: Any) -> Any:
    import torch.distributed as dist

    variant, transport = way
    if variant == "plain":
        return dist.new_group(backend="nccl" if transport == "nccl" else "gloo")
    return (sealed_over if variant == "sealed" else unsealed_over)(transport, device)


def _bound(tensor: Any, group: Any) -> Callable[[], None]:
    import torch.distributed as dist

    def call() -> None:
        dist.all_reduce(tensor, group=group)
        settle(tensor.device)

    return call


def _check_sum(way: Way, call: Callable[[], None], tensor: Any, rank: int, ranks: int) -> None:
    """A way that computes something else is not worth timing."""
    tensor.fill_(rank + 1.0)
    call()
    low, high = float(tensor.min()), float(tensor.max())
    if low != high or high != ranks * (ranks + 1) / 2:
        raise WorkerFailed(f"{' over '.join(way)}: the sum is {low:g} to {high:g}, which is wrong")


def _sealed_and_opened(group: Any, call: Callable[[], None]) -> tuple[int, int]:
    before = group.account()
    call()
    after = group.account()
    return (
        after["sealed_bytes"] - before["sealed_bytes"],
        after["opened_bytes"] - before["opened_bytes"],
    )
