"""Collectives by several variants in turn, among workers of this machine.

plain    torch's Gloo
sealed   sealring
cc       the emulated GPU-TEE path (cc.py), for all_reduce
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from sealring.bench.measure import Samples, alternate, of_slowest
from sealring.bench.noise import Comparison, compare
from sealring.bench.workers import Report, run_workers
from sealring.errors import ConfigurationError
from sealring.results import CollectiveCase

if TYPE_CHECKING:
    import torch

    from sealring.bench.cc import CcRing
    from sealring.results.schema import Transport, Variant

Progress = Callable[[float], None]
"""Gets the part of a case that is done, between 0 and 1."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure."""

    blocks: int = 15
    """Timed blocks of each variant: as many samples."""
    block_bytes: int = 32 << 20
    """What all ranks together move in a block, so that it outlasts a scheduler's whim."""
    most_calls: int = 50

    def calls(self, size: int, ranks: int) -> int:
        return max(2, min(self.most_calls, self.block_bytes // max(1, size * ranks)))


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective of one size, as all variants did it in one run."""

    section: Literal["allreduce", "collectives"]
    collective: str
    ranks: int
    bytes: int
    transport: str
    samples: dict[str, Samples]
    """By variant, of the slowest rank; without `plain` where Gloo lacks the operation."""
    rank_bytes: list[tuple[int, int]]
    """Plaintext that each rank sealed and opened in one call."""
    memory_bytes: int
    """Rank 0's, beyond the user's tensors."""
    calls: int
    threads: int = 1
    """That share a large tensor on each rank, as the ranks agreed."""

    @property
    def label(self) -> str:
        return f"{self.collective}, {self.ranks} ranks"

    def against_plain(self, variant: str = "sealed") -> Comparison | None:
        plain, one = self.samples.get("plain"), self.samples.get(variant)
        return compare(one.seconds, plain.seconds) if plain and one else None

    def cases(self, run: int) -> list[CollectiveCase]:
        sealed, opened = max(self.rank_bytes, key=sum)
        return [
            CollectiveCase(
                collective=self.collective,
                ranks=self.ranks,
                bytes=self.bytes,
                dtype="float32",
                # Gloo, and what is emulated over it, knows TCP only.
                transport=cast("Transport", self.transport if variant == "sealed" else "tcp"),
                variant=cast("Variant", variant),
                device="cpu",
                sealed_bytes=sealed if variant == "sealed" else 0,
                opened_bytes=opened if variant == "sealed" else 0,
                run=run,
                seconds=list(samples.seconds),
            )
            for variant, samples in self.samples.items()
        ]


def measure(
    plan: Sequence[tuple[str, int]],
    ranks: int,
    transport: str,
    variants: Sequence[str],
    effort: Effort,
    progress: Progress | None = None,
    *,
    section: Literal["allreduce", "collectives"] = "collectives",
    threads: int | None = None,
) -> Iterator[Exchange]:
    """Each (collective, bytes) of the plan in one world of workers, as it is measured."""
    environment = {"SEALRING_TRANSPORT": transport}
    if threads is not None:
        environment["SEALRING_THREADS"] = str(threads)
    for _, report in run_workers(
        ranks, _worker, ranks, plan, transport, variants, effort, environment=environment
    ):
        if isinstance(report, Exchange):
            yield replace(report, section=section)
        elif progress is not None:
            progress(report)


# ---- in the workers


class Tensors:
    """What one case works on; the variants take turns with the same memory."""

    def __init__(self, rank: int, ranks: int, size: int) -> None:
        self.rank, self.ranks, self.root = rank, ranks, rank == 0
        self.whole = _touched(size // 4)
        self.other = _touched(size // 4)
        self.part = _touched(size // 4 // ranks)
        self.parts = list(self.whole.chunk(ranks)) if size else []


def _touched(count: int) -> torch.Tensor:
    """Zeros in memory of their own; torch.zeros maps one and the same page again and again."""
    import torch

    return torch.empty(count, dtype=torch.float32).zero_()


def _send_recv(t: Tensors, dist: Any, group: Any) -> None:
    sent = dist.isend(t.whole, (t.rank + 1) % t.ranks, group=group)
    received = dist.irecv(t.other, (t.rank - 1) % t.ranks, group=group)
    received.wait()
    sent.wait()


def _ping_pong(t: Tensors, dist: Any, group: Any) -> None:
    for sender in (0, 1):
        dist.broadcast(t.whole, sender, group=group)


def _named(dist: Any, name: str, earlier: str) -> Callable[..., object]:
    """torch renames these, and warns of the earlier name where it has both."""
    call: Callable[..., object] = getattr(dist, name, None) or getattr(dist, earlier)
    return call


CALLS: Final[dict[str, Callable[[Tensors, Any, Any], object]]] = {
    "all_reduce": lambda t, dist, group: dist.all_reduce(t.whole, group=group),
    "reduce_scatter": lambda t, dist, group: _named(
        dist, "reduce_scatter_single", "reduce_scatter_tensor"
    )(t.part, t.whole, group=group),
    "all_gather": lambda t, dist, group: _named(
        dist, "all_gather_single", "all_gather_into_tensor"
    )(t.whole, t.part, group=group),
    "broadcast": lambda t, dist, group: dist.broadcast(t.whole, 0, group=group),
    "reduce": lambda t, dist, group: dist.reduce(t.whole, 0, group=group),
    "gather": lambda t, dist, group: dist.gather(
        t.part, t.parts if t.root else None, 0, group=group
    ),
    "scatter": lambda t, dist, group: dist.scatter(
        t.part, t.parts if t.root else None, 0, group=group
    ),
    "all_to_all": lambda t, dist, group: dist.all_to_all_single(t.other, t.whole, group=group),
    "send_recv": _send_recv,
    "barrier": lambda t, dist, group: dist.barrier(group=group),
    "ping_pong": _ping_pong,
}
"""How each is called: (tensors, torch.distributed, group)."""


def _worker(
    rank: int,
    report: Report,
    ranks: int,
    plan: Sequence[tuple[str, int]],
    transport: str,
    wanted: Sequence[str],
    effort: Effort,
) -> None:
    import torch.distributed as dist

    from sealring.bench.cc import Path, make_ring

    dist.init_process_group("sealring")
    sealed_group: Any = dist.group.WORLD
    gloo = dist.new_group(backend="gloo")
    ring = make_ring(gloo, Path()) if "cc" in wanted else None
    for name, size in plan:
        variants = _variants(name, Tensors(rank, ranks, size), sealed_group, gloo, ring, wanted)
        calls = effort.calls(size, ranks)
        samples = alternate(
            variants,
            blocks=effort.blocks,
            calls=calls,
            warm_up=3,
            between=dist.barrier,
            after_block=(lambda block: report((block + 1) / effort.blocks)) if rank == 0 else None,
        )
        dist.barrier(gloo)
        before = _sealed_and_opened(sealed_group)
        variants["sealed"]()
        after = _sealed_and_opened(sealed_group)
        own = (after[0] - before[0], after[1] - before[1]), samples
        everyones: list[Any] = [None] * ranks
        dist.all_gather_object(everyones, own, group=gloo)
        if rank == 0:
            report(
                Exchange(
                    section="collectives",
                    collective=name,
                    ranks=ranks,
                    bytes=size,
                    transport=transport,
                    samples=of_slowest([samples for _, samples in everyones]),
                    rank_bytes=[counts for counts, _ in everyones],
                    memory_bytes=sealed_group.account()["memory_bytes"],
                    calls=calls,
                    threads=sealed_group.threads,
                )
            )
    dist.barrier()
    dist.destroy_process_group()


def _variants(
    name: str,
    tensors: Tensors,
    sealed_group: Any,
    gloo: Any,
    ring: CcRing | None,
    wanted: Sequence[str],
) -> dict[str, Callable[[], None]]:
    variants = {"sealed": _bound(name, tensors, sealed_group)}
    if "plain" in wanted and _has(plain := _bound(name, tensors, gloo)):
        variants["plain"] = plain
    if ring is not None and name == "all_reduce":
        emulated = ring
        variants["cc"] = lambda: emulated.all_reduce(tensors.whole)
    return variants


def _bound(name: str, tensors: Tensors, group: Any) -> Callable[[], None]:
    import torch.distributed as dist

    call = CALLS[name]

    def run() -> None:
        call(tensors, dist, group)

    return run


_LACKING: Final = ("not support", "no support", "not implement")


def _has(call: Callable[[], None]) -> bool:
    """Whether Gloo serves this; it refuses what it lacks before it sends anything."""
    try:
        call()
    except RuntimeError as error:  # NotImplementedError among them
        if not any(word in str(error).lower() for word in _LACKING):
            raise
        return False
    return True


def _sealed_and_opened(group: Any) -> tuple[int, int]:
    """Plaintext bytes so far, in collectives and in messages."""
    account = group.account()
    return account["sealed_bytes"], account["opened_bytes"]


def check_sizes(sizes: Sequence[int], ranks: int) -> None:
    for size in sizes:
        if size % (4 * ranks):
            raise ConfigurationError(
                f"{size} bytes of float32 do not split evenly among {ranks} ranks; "
                f"take a multiple of {4 * ranks}"
            )
