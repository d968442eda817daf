"""Whether two variants differ, or whether only the machine did.

Variants alternate, so that their samples come in pairs taken right beside each other. The interval
is that of the median of the pairs' ratios, by order statistics: it assumes nothing about how
times are distributed, which on a shared machine is anything but normal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_DRAWS: Final = 1000
CONFIDENCE: Final = 0.95
SAME_WITHIN: Final = 0.05
"""An interval around 1 that is narrower than this says that the two are the same: a finding."""


@dataclass(frozen=True, slots=True)
class Comparison:
    ratio: float
    """Of the medians."""
    low: float
    high: float
    """19 of 20 repetitions would find the ratio between these two."""

    @property
    def noise(self) -> float:
        """Half the interval, as a part of the ratio."""
        return (self.high - self.low) / 2 / self.ratio

    @property
    def only_noise(self) -> bool:
        """Which of the two takes longer cannot be told, nor that they take the same."""
        return self.low <= 1 <= self.high and self.noise > SAME_WITHIN

    @property
    def told(self) -> float | None:
        """The ratio, unless it is only noise."""
        return None if self.only_noise else self.ratio

    def __str__(self) -> str:
        if self.only_noise:
            return f"only noise (±{self.noise:.0%})"
        return f"{self.ratio:.3f} ({self.low:.2f} to {self.high:.2f})"


def compare(one: Sequence[float], other: Sequence[float]) -> Comparison:
    """How much longer `one` takes than `other`; sample i of both was taken together."""
    ratio = median(one) / median(other)
    pairs = sorted(a / b for a, b in zip(one, other, strict=True))
    low, high = interval(len(pairs))
    return Comparison(ratio, min(ratio, pairs[low]), max(ratio, pairs[high]))


def compare_apart(one: Sequence[float], other: Sequence[float]) -> Comparison:
    """The same for samples of two runs, which come in no pairs: drawn again (bootstrap)."""
    import numpy as np

    generator = np.random.default_rng(0)

    def medians(samples: Sequence[float]) -> NDArray[np.float64]:
        drawn = generator.choice(np.asarray(samples, float), (_DRAWS, len(samples)))
        return np.asarray(np.median(drawn, axis=1), np.float64)

    ratio = median(one) / median(other)
    low, high = np.percentile(medians(one) / medians(other), [2.5, 97.5])
    return Comparison(ratio, min(ratio, float(low)), max(ratio, float(high)))


def interval(count: int) -> tuple[int, int]:
    """Places in `count` sorted samples between which the median lies with CONFIDENCE.

    Fewer than six samples cannot promise that: they give all they have, from first to last.
    """
    outside = 0.0
    cut = 0
    while cut < (count - 1) // 2:
        outside += 2 * math.comb(count, cut) / 2**count
        if outside > 1 - CONFIDENCE:
            break
        cut += 1
    return max(0, cut - 1), count - 1 - max(0, cut - 1)
