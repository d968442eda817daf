"""Measures collectives, sealed against plaintext, and the costs of a link between two ranks.

For `sealring bench allreduce` and `python -m sealring.lab collectives`. `python -m sealring.lab
link` fits a line to two ranks' times: the cost of a message and of a byte.

plain    torch's Gloo
sealed   sealring
cc       the emulated GPU-TEE path (cc.py), for all_reduce

A case's `bytes` are those of the longest float32 tensor (or list of tensors together) that a rank
holds before or after the collective, so that rows of one size are comparable:

all_reduce, reduce    the tensor on each rank, in place
broadcast             the tensor, from rank 0
reduce_scatter        the input of each rank; its output is a part, bytes / ranks
all_gather            the output of each rank; its input is a part
gather                the output of rank 0; every rank gives a part
scatter               the input of rank 0; every rank gets a part
all_to_all            the input of each rank, in equal parts; the output is as long
send_recv             the tensor that each rank sends to the next rank, and receives
barrier               nothing: 0
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from sealring import limits
from sealring.core.schedule import Algorithm, Operation, choose
from sealring.errors import ConfigurationError
from sealring.lab.bench.harness import (
    Cases,
    Comparison,
    Progress,
    Timings,
    against_plain,
    busiest_core,
    gathered,
    in_turn,
    reports_of,
    sealed_world,
)
from sealring.lab.bench.workers import Report
from sealring.lab.results import CollectiveCase, Fit, LinkCase, LinkPoint

if TYPE_CHECKING:
    import torch

    from sealring.lab.bench.cc import CcRing
    from sealring.lab.results import Transport, Variant


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure."""

    blocks: int = 15
    """Timed blocks of each variant. Each block gives one sample."""
    block_bytes: int = 32 << 20
    """The bytes that all ranks move in a block, so that it is long compared with scheduling."""
    most_calls: int = 50

    def calls(self, size: int, ranks: int) -> int:
        return max(2, min(self.most_calls, self.block_bytes // max(1, size * ranks)))


@dataclass(frozen=True, slots=True)
class CollectiveRun:
    """One collective of one size, measured with all variants in one run."""

    section: Literal["allreduce", "collectives"]
    collective: str
    ranks: int
    bytes: int
    transport: str
    samples: dict[str, Timings]
    """The slowest rank's times by variant; without `plain` if Gloo lacks the operation."""
    rank_bytes: list[tuple[int, int]]
    """Plaintext that each rank sealed and opened in one call."""
    memory_bytes: int
    """Rank 0's memory beyond the user's tensors."""
    calls: int
    threads: int = 1
    """The threads of each rank that share a large tensor, as the ranks agreed."""

    @property
    def label(self) -> str:
        return f"{self.collective}, {self.ranks} ranks"

    def against_plain(self, variant: str = "sealed") -> Comparison | None:
        return against_plain(self.samples, variant)

    @property
    def cases(self) -> list[CollectiveCase]:
        sealed, opened = max(self.rank_bytes, key=sum)
        return [
            CollectiveCase(
                collective=self.collective,
                ranks=self.ranks,
                bytes=self.bytes,
                dtype="float32",
                # Gloo, and the path that is emulated over it, use only TCP.
                transport=cast("Transport", self.transport if variant == "sealed" else "tcp"),
                variant=cast("Variant", variant),
                device="cpu",
                sealed_bytes=sealed if variant == "sealed" else 0,
                opened_bytes=opened if variant == "sealed" else 0,
                run=0,
                seconds=list(samples.seconds),
            )
            for variant, samples in self.samples.items()
        ]


def measure(
    section: Literal["allreduce", "collectives"],
    plan: Sequence[tuple[str, int]],
    ranks: int,
    transport: str,
    variants: Sequence[str],
    effort: Effort,
    progress: Progress | None = None,
) -> Iterator[CollectiveRun]:
    """Yields each (collective, bytes) of the plan, measured in one world of workers."""
    environment = {"SEALRING_TRANSPORT": transport}
    arguments = (section, plan, transport, variants, effort)
    return reports_of(ranks, _worker, *arguments, environment=environment, progress=progress)


# ---- in the workers


class Tensors:
    """The tensors of one case; all variants use the same memory in turn."""

    def __init__(self, rank: int, ranks: int, size: int) -> None:
        self.rank, self.ranks, self.root = rank, ranks, rank == 0
        self.whole = _touched(size // 4)
        self.other = _touched(size // 4)
        self.part = _touched(size // 4 // ranks)
        self.parts = list(self.whole.chunk(ranks)) if size else []


def _touched(count: int) -> torch.Tensor:
    """Zeros in physical memory of their own. (torch.zeros maps the same page again and again.)"""
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
    """The function of torch.distributed by its new name, or else by its earlier one.

    If torch has both, the earlier one warns.
    """
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
"""A function for each collective, called with (tensors, torch.distributed, group)."""


def _worker(
    rank: int,
    report: Report,
    section: Literal["allreduce", "collectives"],
    plan: Sequence[tuple[str, int]],
    transport: str,
    wanted: Sequence[str],
    effort: Effort,
) -> None:
    import torch.distributed as dist

    from sealring.lab.bench.cc import make_ring

    with sealed_world() as group:
        ranks = dist.get_world_size()
        gloo = dist.new_group(backend="gloo")
        ring = make_ring(gloo) if "cc" in wanted else None
        for name, size in plan:
            variants = _variants(name, Tensors(rank, ranks, size), group, gloo, ring, wanted)
            calls = effort.calls(size, ranks)
            samples = in_turn(variants, report, blocks=effort.blocks, calls=calls, warm_up=3)
            dist.barrier(gloo)
            own = sealed_and_opened(group, variants["sealed"])
            rank_bytes = gathered(own)
            if rank == 0:
                memory = group.account()["memory_bytes"]
                measured = CollectiveRun(
                    section, name, ranks, size, transport, samples, rank_bytes, memory, calls,
                    group.threads,
                )  # fmt: skip
                report(measured)


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
    """Whether Gloo supports this call. If not, Gloo refuses it before it sends anything."""
    try:
        call()
    except RuntimeError as error:  # NotImplementedError among them
        if not any(word in str(error).lower() for word in _LACKING):
            raise
        return False
    return True


def sealed_and_opened(group: Any, call: Callable[[], None]) -> tuple[int, int]:
    """The (sealed, opened) plaintext bytes of one call on this rank."""
    before = group.account()
    call()
    after = group.account()
    sealed, opened = (after[name] - before[name] for name in ("sealed_bytes", "opened_bytes"))
    return sealed, opened


# ---- cases and their targets


_IN_PARTS: Final = {"reduce_scatter", "all_gather", "gather", "scatter", "all_to_all"}
COLLECTIVES: Final = tuple(name for name in CALLS if name != "ping_pong")
SMALL_BYTES: Final = 4 << 10
"""Up to this size the target is Gloo's time, because latency matters."""
LARGE_BYTES: Final = 25 << 20
"""From this size on, in shared memory, the target is OF_GLOO x Gloo or OF_FLOOR x the floor."""
OF_GLOO: Final = 1.5
OF_FLOOR: Final = 1.4


def plan_of(names: Sequence[str], ranks: int, sizes: Sequence[int]) -> list[tuple[str, int]]:
    """The (collective, bytes) of each case. A barrier has no size, so it is one case."""
    unknown = [name for name in names if name not in COLLECTIVES]
    if unknown:
        raise ConfigurationError(
            f"{unknown[0]!r} is not a collective; there is {', '.join(COLLECTIVES)}"
        )
    for size in sizes if _IN_PARTS & set(names) else ():
        if size % (4 * ranks):
            raise ConfigurationError(
                f"{size} bytes of float32 do not split evenly among {ranks} ranks; "
                f"take a multiple of {4 * ranks}"
            )
    return [(name, size) for name in names for size in ([0] if name == "barrier" else sizes)]


def bar(size: int, transport: str, gloo: float | None, floor: float) -> float | None:
    """The target time, in the unit of the two given times; None if there is none."""
    if size <= SMALL_BYTES:
        return gloo
    if size >= LARGE_BYTES and transport == "shm":
        return max(OF_GLOO * (gloo or 0.0), OF_FLOOR * floor)
    return None


def row(case: CollectiveRun, aes_bytes_per_s: float) -> dict[str, Any]:
    """One case as JSON, with its floor and its target.

    A ratio is None if it would be noise, `gloo_us` if Gloo lacks the operation, and `bar_us` if
    there is no target. No schedule with `busiest_core_bytes` can take less than `floor_us`.
    """
    sealed, gloo, cc = (case.samples.get(each) for each in ("sealed", "plain", "cc"))
    assert sealed is not None
    compared, emulated = case.against_plain(), case.against_plain("cc")
    per_rank = [sum(each) for each in case.rank_bytes]
    busiest = busiest_core(per_rank, len(os.sched_getaffinity(0)))
    floor_us = busiest / aes_bytes_per_s * 1e6
    gloo_us = gloo.median * 1e6 if gloo else None
    bar_us = bar(case.bytes, case.transport, gloo_us, floor_us)
    return {
        "collective": case.collective,
        "ranks": case.ranks,
        "bytes": case.bytes,
        "transport": case.transport,
        "threads": case.threads,
        "suite": limits.SUITE,
        "sealed_us": round(sealed.median * 1e6, 1),
        "gloo_us": gloo_us and round(gloo_us, 1),
        "cc_us": cc and round(cc.median * 1e6, 1),
        "ratio": compared and compared.told and round(compared.told, 4),
        "noise": compared and round(compared.noise, 4),
        "cc_ratio": emulated and emulated.told and round(emulated.told, 4),
        "floor_us": round(floor_us, 2),
        "bar_us": bar_us and round(bar_us, 1),
        "meets_bar": sealed.median * 1e6 <= bar_us if bar_us else None,
        "busiest_core_bytes": busiest,
        "aes_bytes_per_s": round(aes_bytes_per_s),
        "sealed_bytes": case.rank_bytes[0][0],
        "memory_bytes_per_link": case.memory_bytes // max(1, case.ranks - 1),
        "sealed_spread": round(sealed.spread, 4),
        "gloo_spread": gloo and round(gloo.spread, 4),
        "blocks": len(sealed.seconds),
        "calls": case.calls,
    }


# ---- a link between two ranks


OPERATIONS: Final = ("all_reduce", "ping_pong")
SIZES: Final = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 25 << 20)


def _hop(operation: str, transport: str, exchanges: Sequence[CollectiveRun]) -> Cases:
    """The cases of one operation over one transport, one for each variant."""
    cases = []
    for variant in exchanges[0].samples:
        points = [_point(exchange, variant) for exchange in exchanges]
        cases.append(
            LinkCase(
                operation=cast("Literal['ping_pong', 'all_reduce']", operation),
                transport=cast("Transport", transport if variant == "sealed" else "tcp"),
                variant=cast("Variant", variant),
                device="cpu",
                run=0,
                points=points,
                fit=fit(points),
            )
        )
    return Cases("link", cases)


def _point(exchange: CollectiveRun, variant: str) -> LinkPoint:
    seconds = list(exchange.samples[variant].seconds)
    if exchange.collective == "ping_pong":
        return LinkPoint(exchange.bytes, 1, [each / 2 for each in seconds])
    # A small tensor is sent whole, in one exchange; a larger one in halves, in two exchanges.
    chosen = choose(Operation.ALL_REDUCE, exchange.ranks, exchange.bytes)
    if variant == "sealed" and chosen is Algorithm.DIRECT:
        return LinkPoint(exchange.bytes, 1, seconds)
    return LinkPoint(exchange.bytes // 2, 2, seconds)


def measure_link(
    transport: str,
    operations: Sequence[str],
    sizes: Sequence[int],
    variants: Sequence[str],
    effort: Effort,
    progress: Progress | None = None,
) -> Iterator[Cases]:
    plan = [(operation, size) for operation in operations for size in sizes]
    points: list[CollectiveRun] = []

    def within(part: float) -> None:  # a hop is one case, and its sizes are parts of it
        if progress is not None:
            progress((len(points) + part) / len(sizes))

    for exchange in measure("collectives", plan, 2, transport, variants, effort, within):
        points.append(exchange)
        if len(points) == len(sizes):
            yield _hop(exchange.collective, transport, points)
            points.clear()


# ---- the line T = alpha * messages + bytes / beta
#
# Fitted by least squares of the relative error, so that short times count as much as long ones.
# Neither cost can be negative. The confidence intervals come from a bootstrap of the samples.


DRAWS: Final = 400
WORST_RESIDUAL: Final = 0.5
"""If the median relative distance from the line is larger, no line is given."""


def fit(points: Sequence[LinkPoint]) -> Fit | None:
    """Fits the line; None for fewer than three points, and if they are not on a line."""
    if len(points) < 3:
        return None
    costs = np.array(
        [[point.messages, point.messages * point.bytes] for point in points], dtype=float
    )
    times = np.array([median(point.seconds) for point in points], np.float64)
    alpha, per_byte = _solve(costs, times)
    residual = float(np.median(np.abs(costs @ [alpha, per_byte] - times) / times))
    if per_byte <= 0 or residual > WORST_RESIDUAL:
        return None
    generator = np.random.default_rng(0)
    solved = [_solve(costs, _redrawn(points, generator)) for _ in range(DRAWS)]
    drawn = np.array(solved, np.float64)
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    return Fit(
        alpha_s=float(alpha),
        alpha_low_s=float(min(low[0], alpha)),
        alpha_high_s=float(max(high[0], alpha)),
        beta_bytes_per_s=float(1 / per_byte),
        beta_low_bytes_per_s=float(1 / max(high[1], per_byte)),
        beta_high_bytes_per_s=float(1 / min(low[1], per_byte)) if low[1] > 0 else 1 / per_byte,
        residual=residual,
    )


def predicted(line: Fit, messages: int, message_bytes: int) -> float:
    """The seconds for `messages` messages one after the other, by the line."""
    return messages * (line.alpha_s + message_bytes / line.beta_bytes_per_s)


def line_words(line: Fit | None) -> tuple[str, str, str]:
    """Texts for alpha in µs and beta in GB/s, each with its interval, and for the residual."""
    if line is None:
        return "no line fits", "-", "-"
    alphas = line.alpha_s, line.alpha_low_s, line.alpha_high_s
    betas = line.beta_bytes_per_s, line.beta_low_bytes_per_s, line.beta_high_bytes_per_s
    alpha, *about_alpha = (f"{one * 1e6:,.1f}" for one in alphas)
    beta, *about_beta = (f"{one / 1e9:.2f}" for one in betas)
    return (
        f"{alpha} ({' to '.join(about_alpha)})",
        f"{beta} ({' to '.join(about_beta)})",
        f"{line.residual:.0%}",
    )


def _redrawn(points: Sequence[LinkPoint], generator: np.random.Generator) -> NDArray[np.float64]:
    return np.array(
        [np.median(generator.choice(point.seconds, len(point.seconds))) for point in points],
        np.float64,
    )


def _solve(costs: NDArray[np.float64], times: NDArray[np.float64]) -> tuple[float, float]:
    scaled = costs / times[:, None]
    ones = np.ones(len(times), np.float64)
    alpha, per_byte = np.linalg.lstsq(scaled, ones, rcond=None)[0]
    if alpha < 0 or per_byte < 0:
        # One of the two unknowns is at its bound 0; solve for the other.
        column = scaled[:, 1] if alpha < 0 else scaled[:, 0]
        only = float(column @ ones / (column @ column))
        return (0.0, only) if alpha < 0 else (only, 0.0)
    return float(alpha), float(per_byte)
