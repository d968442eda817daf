"""Times that can be compared: the variants alternate in one run, and medians are taken."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Samples:
    """Seconds per call, one value per block of calls."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def fastest(self) -> float:
        """What else runs on a machine only ever adds to a time."""
        return min(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a part of the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median


def of_slowest(ranks: Sequence[Mapping[Key, Samples]]) -> dict[Key, Samples]:
    """A block is done when its last rank is: a root that only sends is ready long before."""
    return {
        key: Samples(tuple(map(max, zip(*(own[key].seconds for own in ranks), strict=True))))
        for key in ranks[0]
    }


def alternate(
    variants: Mapping[Key, Callable[[], None]],
    *,
    blocks: int,
    calls: int,
    warm_up: int,
    between: Callable[[], object],
    after_block: Callable[[int], None] | None = None,
) -> dict[Key, Samples]:
    """Blocks of `calls` calls of each variant in turn; `between` lines the ranks up before each."""
    for call in variants.values():
        for _ in range(warm_up):
            call()
    seconds: dict[Key, list[float]] = {name: [] for name in variants}
    for block in range(blocks):
        for name, call in _rotated(list(variants.items()), block):
            between()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            seconds[name].append((time.perf_counter() - start) / calls)
        if after_block is not None:
            after_block(block)
    return {name: Samples(tuple(values)) for name, values in seconds.items()}


def _rotated(
    variants: Sequence[tuple[Key, Callable[[], None]]], by: int
) -> Sequence[tuple[Key, Callable[[], None]]]:
    """Each variant goes first equally often: the one that follows finds other caches."""
    turn = by % len(variants)
    return [*variants[turn:], *variants[:turn]]
