"""`sealring bench collectives`: every collective, sealed against torch's plaintext Gloo.

A case's `bytes` are the longest float32 tensor (or list of tensors, taken together) that one rank
holds before or after the collective, so that the rows of a size compare:

all_reduce, reduce    the tensor on each rank, in place
broadcast             the tensor, from rank 0
reduce_scatter        the input of each rank; its output is a part, bytes / ranks
all_gather            the output of each rank; its input is a part
gather                what rank 0 has in the end; every rank gives a part
scatter               what rank 0 has at first; every rank gets a part
all_to_all            the input of each rank, and as much output, in equal parts
send_recv             what each rank sends to the next one, and gets from the one before
barrier               nothing: 0
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from sealring import limits
from sealring.bench.measure import Samples, alternate
from sealring.bench.workers import Report, run_workers
from sealring.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

SMALL_BYTES: Final = 4 << 10
"""Up to here the bar is Gloo's time itself: what counts is how soon a message is there."""
LARGE_BYTES: Final = 25 << 20
"""From here on, in shared memory, the bar is what may be added to copying or to AES."""
OF_GLOO: Final = 1.5
OF_FLOOR: Final = 1.4


@dataclass(frozen=True, slots=True)
class Case:
    collective: str
    ranks: int
    bytes: int
    transport: str
    sealed_us: float
    gloo_us: float | None
    """None where Gloo lacks the operation."""
    floor_us: float
    """busiest_core_bytes at aes_bytes_per_s: no schedule of these bytes can take less."""
    ratio: float | None
    bar_us: float | None
    """What sealed_us is to stay within; None where no bar is set."""
    meets_bar: bool | None
    busiest_core_bytes: int
    """Plaintext that it seals and opens for one call, as the engines counted it."""
    aes_bytes_per_s: float
    sealed_spread: float
    gloo_spread: float | None
    blocks: int
    calls: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_collectives(
    names: Sequence[str],
    ranks: int,
    sizes: Sequence[int],
    transport: str,
    *,
    blocks: int = 15,
    progress: Callable[[float], None] | None = None,
) -> Iterator[Case]:
    """Yields each case once it is measured; `progress` gets the part of its blocks that is done."""
    rate = aes_rate()
    environment = {"SEALRING_TRANSPORT": transport}
    plan = plan_of(names, ranks, sizes)
    for _, report in run_workers(
        ranks, _worker, ranks, plan, transport, rate, blocks, environment=environment
    ):
        if isinstance(report, Case):
            yield report
        elif progress is not None:
            progress(report)


def plan_of(names: Sequence[str], ranks: int, sizes: Sequence[int]) -> list[tuple[str, int]]:
    """(collective, bytes) of each case. A barrier has no size, so there is one of it."""
    unknown = [name for name in names if name not in COLLECTIVES]
    if unknown:
        raise ConfigurationError(
            f"{unknown[0]!r} is not a collective; there is {', '.join(COLLECTIVES)}"
        )
    for size in sizes:
        if size % (4 * ranks):
            raise ConfigurationError(
                f"{size} bytes of float32 do not split evenly among {ranks} ranks; "
                f"take a multiple of {4 * ranks}"
            )
    return [(name, size) for name in names for size in ([0] if name == "barrier" else sizes)]


def aes_rate() -> float:
    """Bytes a second of AES-256-GCM on one core, in records as long as ours, from memory at hand.

    The best of many runs: the floor is what the core can do, whoever else uses it just now.
    """
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    cipher, nonce = AESGCM(os.urandom(limits.KEY_BYTES)), bytes(12)
    plain = bytearray(limits.RECORD_BYTES)
    sealed = bytearray(limits.RECORD_BYTES + limits.TAG_BYTES)
    cipher.encrypt_into(nonce, plain, None, sealed)
    seal = _shortest(lambda: cipher.encrypt_into(nonce, plain, None, sealed))
    open_ = _shortest(lambda: cipher.decrypt_into(nonce, sealed, None, plain))
    return 2 * limits.RECORD_BYTES / (seal + open_)


def _shortest(call: Callable[[], object], runs: int = 400) -> float:
    shortest = float("inf")
    for _ in range(runs):
        start = time.perf_counter()
        call()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest


def busiest_core(rank_bytes: Sequence[int], cores: int) -> int:
    """What the busiest core seals and opens at least, given what each rank does.

    A rank's work is on one core; ranks that outnumber the cores share them, at best evenly.
    """
    return max(max(rank_bytes), -(-sum(rank_bytes) // min(len(rank_bytes), cores)))


def bar(size: int, transport: str, gloo: float | None, floor: float) -> float | None:
    """The time to stay within, in the unit of the two given."""
    if size <= SMALL_BYTES:
        return gloo
    if size >= LARGE_BYTES and transport == "shm":
        return max(OF_GLOO * (gloo or 0.0), OF_FLOOR * floor)
    return None


# ---- in the workers


class _Tensors:
    """What one case works on; sealring and Gloo take turns with the same memory."""

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


def _send_recv(t: _Tensors, dist: Any, group: Any) -> None:
    sent = dist.isend(t.whole, (t.rank + 1) % t.ranks, group=group)
    received = dist.irecv(t.other, (t.rank - 1) % t.ranks, group=group)
    received.wait()
    sent.wait()


def _named(dist: Any, name: str, earlier: str) -> Callable[..., object]:
    """torch renames these, and warns of the earlier name where it has both."""
    call: Callable[..., object] = getattr(dist, name, None) or getattr(dist, earlier)
    return call


COLLECTIVES: Final[dict[str, Callable[[_Tensors, Any, Any], object]]] = {
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
}
"""How each is called: (tensors, torch.distributed, group)."""


def _worker(
    rank: int,
    report: Report,
    ranks: int,
    plan: list[tuple[str, int]],
    transport: str,
    rate: float,
    blocks: int,
) -> None:
    import torch.distributed as dist

    dist.init_process_group("sealring")
    sealed_group: Any = dist.group.WORLD
    gloo = dist.new_group(backend="gloo")
    for name, size in plan:
        tensors = _Tensors(rank, ranks, size)
        variants = {"sealed": _bound(name, tensors, sealed_group)}
        if _has(plain := _bound(name, tensors, gloo)):
            variants["gloo"] = plain
        calls = max(3, min(50, (32 << 20) // max(1, size * ranks)))
        samples = alternate(
            variants,
            blocks=blocks,
            calls=calls,
            warm_up=3,
            between=dist.barrier,
            after_block=(lambda block: report((block + 1) / blocks)) if rank == 0 else None,
        )
        dist.barrier(gloo)
        before = _sealed_and_opened(sealed_group)
        variants["sealed"]()
        own: tuple[int, dict[str, Samples]] = (_sealed_and_opened(sealed_group) - before, samples)
        everyones: list[Any] = [None] * ranks
        dist.all_gather_object(everyones, own, group=gloo)
        if rank == 0:
            report(_case(name, size, transport, everyones, rate, blocks, calls))
    dist.barrier()
    dist.destroy_process_group()


def _bound(name: str, tensors: _Tensors, group: Any) -> Callable[[], None]:
    import torch.distributed as dist

    call = COLLECTIVES[name]

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


def _sealed_and_opened(group: Any) -> int:
    """Plaintext bytes so far, in collectives and in messages."""
    accounts = (group.account(), group._messages._mailbox.account())
    return sum(account["sealed_bytes"] + account["opened_bytes"] for account in accounts)


def _case(
    name: str,
    size: int,
    transport: str,
    everyones: list[tuple[int, dict[str, Samples]]],
    rate: float,
    blocks: int,
    calls: int,
) -> Case:
    ranks = len(everyones)
    times = {
        variant: _of_slowest([samples[variant] for _, samples in everyones])
        for variant in everyones[0][1]
    }
    sealed, gloo = times["sealed"], times.get("gloo")
    busiest = busiest_core([count for count, _ in everyones], len(os.sched_getaffinity(0)))
    sealed_us, floor_us = sealed.median * 1e6, busiest / rate * 1e6
    gloo_us = gloo.median * 1e6 if gloo else None
    bar_us = bar(size, transport, gloo_us, floor_us)
    return Case(
        collective=name,
        ranks=ranks,
        bytes=size,
        transport=transport,
        sealed_us=round(sealed_us, 1),
        gloo_us=round(gloo_us, 1) if gloo_us else None,
        floor_us=round(floor_us, 2),
        ratio=round(sealed_us / gloo_us, 4) if gloo_us else None,
        bar_us=round(bar_us, 1) if bar_us else None,
        meets_bar=sealed_us <= bar_us if bar_us else None,
        busiest_core_bytes=busiest,
        aes_bytes_per_s=round(rate),
        sealed_spread=round(sealed.spread, 4),
        gloo_spread=round(gloo.spread, 4) if gloo else None,
        blocks=blocks,
        calls=calls,
    )


def _of_slowest(ranks: Sequence[Samples]) -> Samples:
    """A block is done when its last rank is: a root that only sends is ready long before."""
    return Samples(tuple(map(max, zip(*(samples.seconds for samples in ranks), strict=True))))
