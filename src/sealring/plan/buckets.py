"""How DDP cuts the gradients: the order in which they come, until a bucket is full.

From the second step on, torch fills buckets in the order in which gradients arrived in the first,
which is the reverse of registration. The one that makes a bucket full still goes into it. The first
bucket is full at 1 MiB where `bucket_cap_mb` is left at its default, so that the first all-reduce
starts early; a cap that is given holds for the first one too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sealring.errors import ConfigurationError
from sealring.plan.model import Model

DEFAULT_CAP_MB: Final = 25.0
_DEFAULT_FIRST_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Bucket:
    bytes: int
    ready: float
    """The part of backward after which all of it is there."""


def limits_of(cap_mb: float | None) -> tuple[int, int]:
    """(first, further) limits in bytes; None is torch's default."""
    if cap_mb is None:
        return _DEFAULT_FIRST_BYTES, int(DEFAULT_CAP_MB * (1 << 20))
    if not 0 < cap_mb < 1 << 30:
        raise ConfigurationError(
            f"a bucket of {cap_mb:g} MB holds no gradient; give --bucket-mb a number above 0, or "
            "leave it out to have the best one found"
        )
    limit = max(1, int(cap_mb * (1 << 20)))
    return limit, limit


def fill(sizes: Sequence[int], limits: tuple[int, int]) -> list[list[int]]:
    """Indices into `sizes`, bucket by bucket."""
    buckets: list[list[int]] = []
    current: list[int] = []
    held = 0
    for index, size in enumerate(sizes):
        current.append(index)
        held += size
        if held >= limits[1 if buckets else 0]:
            buckets.append(current)
            current, held = [], 0
    return [*buckets, current] if current else buckets


def buckets_of(model: Model, cap_mb: float | None, itemsize: int) -> list[Bucket]:
    sizes = [parameter.count * itemsize for parameter in reversed(model.parameters)]
    ready = model.ready_fractions()
    return [
        Bucket(sum(sizes[index] for index in indices), ready[indices[-1]])
        for indices in fill(sizes, limits_of(cap_mb))
    ]
