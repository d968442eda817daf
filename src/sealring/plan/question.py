"""What is asked of the planner, and what it answers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from sealring.plan.collectives import Cluster
from sealring.plan.forming import Forming
from sealring.plan.memory import Memory, Precision
from sealring.plan.model import Model
from sealring.plan.profiles import Network, Profile, Way
from sealring.plan.timeline import Compute


@dataclass(frozen=True, slots=True)
class Question:
    model: Model
    profile: Profile
    network: Network
    ranks: int
    per_host: int
    batch: int
    precision: Precision
    bucket_mb: float | None = None
    """None: the best is found."""
    price: float | None = None
    """Per GPU (or rank) and hour."""
    compute: Compute | None = None
    """Measured; None: reckoned from the arithmetic."""
    forming: Forming | None = None
    """Measured; None: as shipped."""

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.ranks, min(self.per_host, self.ranks))


@dataclass(frozen=True, slots=True)
class WayAnswer:
    way: Way
    layout: str
    seconds: float
    against_plain: float
    compute_s: float
    communicating_s: float
    exposed_s: float
    bucket_mb: float | None
    """None where there are no buckets."""
    default_buckets: bool
    """That is what DDP does if it is given no bucket_cap_mb: 25, but 1 MiB for the first."""
    all_reduces: int
    algorithm: str
    default_bucket_seconds: float | None
    """The same with torch's default buckets; None where there are no buckets."""
    samples_per_s: float
    cost_per_million_samples: float | None


@dataclass(frozen=True, slots=True)
class LayoutAnswer:
    layout: str
    device_bytes: float
    fits: bool
    seconds: dict[str, float]
    """By way."""
    memory: Memory


@dataclass(frozen=True, slots=True)
class BucketAnswer:
    bucket_mb: float
    default: bool
    """DDP without a bucket_cap_mb: the first bucket is 1 MiB."""
    all_reduces: int
    seconds: dict[str, float]
    """By way."""


@dataclass(frozen=True, slots=True)
class SizeAnswer:
    bytes: int
    algorithm: str
    """The fastest for one sealed all-reduce of this size."""
    seconds: float
    by_default: str
    default_seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    model: str
    parameters: int
    profile: str
    network: str
    ranks: int
    hosts: int
    batch: int
    precision: Precision
    layout: str
    why: str
    ways: list[WayAnswer]
    layouts: list[LayoutAnswer]
    buckets: list[BucketAnswer]
    """Every cap that was tried."""
    algorithms: list[SizeAnswer]
    cost_per_day: float | None
    forming_s: float
    """Until the sealed group of all ranks exists."""

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
