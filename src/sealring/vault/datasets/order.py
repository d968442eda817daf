"""The order of samples: a pure function of a seed, the position and the shards' sizes.

It does not depend on ranks, data-loader workers or machines. Random numbers come from Philox4x64
with a key derived by SHA-256. A permutation is a stable sort of them. Both are fixed for ever,
while the shuffles of numpy and torch may change with a release.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from sealring.errors import ConfigurationError

MIXED: Final = 1024
"""Each dataset of a mixture has its exact share in every block of this many samples."""
Numbers = npt.NDArray[np.int64]


def permutation(count: int, *what: int | str) -> Numbers:
    """A permutation of 0 to count - 1. `what` names its purpose; other purposes give others."""
    digest = hashlib.sha256(repr(("sealring order 1", *what)).encode()).digest()
    key = np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64)
    drawn = np.random.Philox(key=key).random_raw(count)
    return np.argsort(drawn, kind="stable").astype(np.int64)


def _distinct(numbers: Numbers) -> list[int]:
    """The distinct numbers, sorted. Fast for runs of equal numbers: it sorts one of each run."""
    firsts = np.flatnonzero(np.diff(numbers)) + 1
    found: list[int] = np.unique(np.append(numbers[:1], numbers[firsts])).tolist()
    return found


class ShardOrder:
    """The order of one dataset: permutes the shards, then the samples within blocks.

    A block lies in one or a few shards, so samples that are read together lie together.
    """

    def __init__(self, sizes: Sequence[int], seed: int, block: int) -> None:
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._seed, self._block = seed, block
        self.length = int(self._sizes.sum())
        if self.length == 0:
            raise ConfigurationError("the dataset has no samples")
        self._shards = lru_cache(maxsize=2)(self._shards_of)
        self._within = lru_cache(maxsize=4)(self._within_of)

    def locate(self, positions: Numbers) -> tuple[Numbers, Numbers]:
        """The shard of each position, and the number in it. Positions count on through epochs."""
        shards, numbers = np.empty_like(positions), np.empty_like(positions)
        epochs = positions // self.length
        for epoch in _distinct(epochs):
            chosen = epochs == epoch
            shards[chosen], numbers[chosen] = self._in_epoch(epoch, positions[chosen] % self.length)
        return shards, numbers

    def _in_epoch(self, epoch: int, positions: Numbers) -> tuple[Numbers, Numbers]:
        shards, ends = self._shards(epoch)
        if self._block:
            places = np.empty_like(positions)
            blocks = positions // self._block
            for block in _distinct(blocks):
                chosen = blocks == block
                first = block * self._block
                places[chosen] = first + self._within(epoch, block)[positions[chosen] - first]
        else:
            places = positions
        index = np.searchsorted(ends, places, side="right")
        return shards[index], places - (ends[index] - self._sizes[shards[index]])

    def _shards_of(self, epoch: int) -> tuple[Numbers, Numbers]:
        count = len(self._sizes)
        if self._block:
            shards = permutation(count, "shards", self._seed, epoch)
        else:
            shards = np.arange(count, dtype=np.int64)
        return shards, np.cumsum(self._sizes[shards])

    def _within_of(self, epoch: int, block: int) -> Numbers:
        size = min(self._block, self.length - block * self._block)
        return permutation(size, "samples", self._seed, epoch, block)


class Mixture:
    """Several datasets, each with its share of every 1024 samples and its own order."""

    def __init__(
        self, sizes: Sequence[Sequence[int]], weights: Sequence[float], seed: int, block: int
    ) -> None:
        self.orders = [ShardOrder(one, seed, block) for one in sizes]
        self._seed = seed
        self._shares = shares(weights)
        self.length = sum(order.length for order in self.orders)
        self._slots = lru_cache(maxsize=8)(self._slots_of)

    def locate(self, positions: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """For each position the dataset, the shard and the number in the shard."""
        if len(self.orders) == 1:
            return np.zeros_like(positions), *self.orders[0].locate(positions)
        sources, inside = np.empty_like(positions), np.empty_like(positions)
        blocks = positions // MIXED
        for block in _distinct(blocks):
            chosen = blocks == block
            slots = positions[chosen] - block * MIXED
            owners, ranks = self._slots(block)
            sources[chosen] = owners[slots]
            inside[chosen] = block * self._shares[owners[slots]] + ranks[slots]
        shards, numbers = np.empty_like(positions), np.empty_like(positions)
        for number, order in enumerate(self.orders):
            chosen = sources == number
            shards[chosen], numbers[chosen] = order.locate(inside[chosen])
        return sources, shards, numbers

    def _slots_of(self, block: int) -> tuple[Numbers, Numbers]:
        """For each of the 1024 slots: its dataset, and how many slots of it come before."""
        owners = np.repeat(np.arange(len(self._shares), dtype=np.int64), self._shares)
        owners = owners[permutation(MIXED, "mixture", self._seed, block)]
        ranks = np.empty(MIXED, dtype=np.int64)
        for number in range(len(self._shares)):
            chosen = owners == number
            ranks[chosen] = np.arange(int(chosen.sum()), dtype=np.int64)
        return owners, ranks


def shares(weights: Sequence[float]) -> Numbers:
    """Each dataset's number of samples in 1024, by the method of largest remainders."""
    if not all(math.isfinite(one) and one > 0 for one in weights):
        raise ConfigurationError("each weight of a mixture is a number above 0")
    # Fractions, because the rounding of a sum of floats depends on the order of the additions.
    given = [Fraction(float(one)) for one in weights]
    exact = [one * MIXED / sum(given) for one in given]
    counts = [math.floor(one) for one in exact]
    by_remainder = sorted(range(len(exact)), key=lambda one: counts[one] - exact[one])
    for one in by_remainder[: MIXED - sum(counts)]:
        counts[one] += 1
    if 0 in counts:
        raise ConfigurationError(f"a weight of a mixture is below 1/{MIXED} of all of them")
    return np.array(counts, dtype=np.int64)
