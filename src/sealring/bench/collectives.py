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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from sealring.bench.exchange import CALLS, Effort, Exchange, Progress, check_sizes, measure
from sealring.bench.floor import busiest_core
from sealring.bench.noise import Comparison
from sealring.errors import ConfigurationError

COLLECTIVES: Final = tuple(name for name in CALLS if name != "ping_pong")
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
    """None where there is no Gloo, or where it would be only noise."""
    noise: float | None
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
    effort: Effort,
    progress: Progress | None = None,
) -> Iterator[Exchange]:
    """Yields each case once it is measured."""
    plan = plan_of(names, ranks, sizes)
    return measure(plan, ranks, transport, ("plain", "sealed"), effort, progress)


def plan_of(names: Sequence[str], ranks: int, sizes: Sequence[int]) -> list[tuple[str, int]]:
    """(collective, bytes) of each case. A barrier has no size, so there is one of it."""
    unknown = [name for name in names if name not in COLLECTIVES]
    if unknown:
        raise ConfigurationError(
            f"{unknown[0]!r} is not a collective; there is {', '.join(COLLECTIVES)}"
        )
    check_sizes(sizes, ranks)
    return [(name, size) for name in names for size in ([0] if name == "barrier" else sizes)]


def bar(size: int, transport: str, gloo: float | None, floor: float) -> float | None:
    """The time to stay within, in the unit of the two given."""
    if size <= SMALL_BYTES:
        return gloo
    if size >= LARGE_BYTES and transport == "shm":
        return max(OF_GLOO * (gloo or 0.0), OF_FLOOR * floor)
    return None


def judged(exchange: Exchange, rate: float) -> Case:
    """A measured case beside its floor and its bar; `rate` is AES's, in bytes a second."""
    sealed, gloo = exchange.samples["sealed"], exchange.samples.get("plain")
    compared: Comparison | None = exchange.against_plain()
    busiest = busiest_core(
        [sum(each) for each in exchange.rank_bytes], len(os.sched_getaffinity(0))
    )
    sealed_us, floor_us = sealed.median * 1e6, busiest / rate * 1e6
    gloo_us = gloo.median * 1e6 if gloo else None
    bar_us = bar(exchange.bytes, exchange.transport, gloo_us, floor_us)
    told = compared.told if compared else None
    return Case(
        collective=exchange.collective,
        ranks=exchange.ranks,
        bytes=exchange.bytes,
        transport=exchange.transport,
        sealed_us=round(sealed_us, 1),
        gloo_us=round(gloo_us, 1) if gloo_us else None,
        floor_us=round(floor_us, 2),
        ratio=round(told, 4) if told else None,
        noise=round(compared.noise, 4) if compared else None,
        bar_us=round(bar_us, 1) if bar_us else None,
        meets_bar=sealed_us <= bar_us if bar_us else None,
        busiest_core_bytes=busiest,
        aes_bytes_per_s=round(rate),
        sealed_spread=round(sealed.spread, 4),
        gloo_spread=round(gloo.spread, 4) if gloo else None,
        blocks=len(sealed.seconds),
        calls=exchange.calls,
    )
