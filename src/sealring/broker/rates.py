"""How often one address may ask: a bucket for each that fills at a steady rate."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

_ADDRESSES: Final = 1 << 16
"""Remembered at most. The one that is forgotten had not asked for the longest time."""


class Rates:
    def __init__(self, per_second: float, burst: int) -> None:
        self._per_second = per_second
        self._burst = burst
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def allow(self, address: str, now: float) -> bool:
        left, then = self._buckets.pop(address, (float(self._burst), now))
        left = min(self._burst, left + (now - then) * self._per_second)
        allowed = left >= 1
        self._buckets[address] = (left - allowed, now)
        if len(self._buckets) > _ADDRESSES:
            self._buckets.popitem(last=False)
        return allowed
