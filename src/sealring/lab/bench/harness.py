"""Shared by all benchmarks: taking samples in turn, comparing them, and writing the results file.

The variants of a case alternate in one run, so that other load on the machine slows all of them
equally. A benchmark is a BenchJob: its workers measure, and their reports become cases of a
Results.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring import _native, limits
from sealring.core.group.settings import read_settings
from sealring.core.schedule.table import format_table
from sealring.lab.bench.workers import Report, run_workers
from sealring.lab.results import Results, spread_of, this_machine, write_results

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


Key = TypeVar("Key")
Progress = Callable[[float], None]
"""A function that gets the finished part of a case, between 0 and 1."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds per call, one value per block of calls."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def fastest(self) -> float:
        """The shortest time. Other programs on a machine can only add to a time."""
        return min(self.seconds)

    @property
    def spread(self) -> float:
        return spread_of(self.seconds)


def of_slowest(ranks: Sequence[Mapping[Key, Timings]]) -> dict[Key, Timings]:
    """The samples of the slowest rank in each block. (A root that only sends is done early.)"""
    return {
        key: Timings(tuple(map(max, zip(*(own[key].seconds for own in ranks), strict=True))))
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
) -> dict[Key, Timings]:
    """Times blocks of `calls` calls of each variant in turn; calls `between` before each block."""
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
    return {name: Timings(tuple(values)) for name, values in seconds.items()}


def _rotated(
    variants: Sequence[tuple[Key, Callable[[], None]]], by: int
) -> Sequence[tuple[Key, Callable[[], None]]]:
    """Rotates the variants, so that each goes first equally often. Caches differ by the order."""
    turn = by % len(variants)
    return [*variants[turn:], *variants[:turn]]


def seconds_of(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


# ---- worlds of workers


def reports_of(
    ranks: int,
    worker: Callable[..., None],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Iterator[Any]:
    """Yields the workers' reports, except floats, which are progress and go to `progress`."""
    for _, report in run_workers(ranks, worker, *arguments, environment=environment):
        if not isinstance(report, float):
            yield report
        elif progress is not None:
            progress(report)


@contextmanager
def sealed_world() -> Iterator[Any]:
    """In a worker: makes the sealed group of all ranks; at the end all ranks leave it together."""
    import torch.distributed as dist

    dist.init_process_group("sealring")
    yield dist.group.WORLD
    dist.barrier()
    dist.destroy_process_group()


def gathered(own: Any) -> list[Any]:
    """In a worker: returns every rank's value, by rank."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return [own]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    return everyones


def in_turn(
    variants: Mapping[Key, Callable[[], None]],
    report: Report,
    *,
    blocks: int,
    calls: int = 1,
    warm_up: int = 1,
    between: Callable[[], object] | None = None,
) -> dict[Key, Timings]:
    """In a worker: like `alternate`, with the slowest rank's times. Rank 0 reports progress."""
    import torch.distributed as dist

    together = dist.is_initialized()
    first = not together or dist.get_rank() == 0
    samples = alternate(
        variants,
        blocks=blocks,
        calls=calls,
        warm_up=warm_up,
        between=between or (dist.barrier if together else lambda: None),
        after_block=(lambda block: report((block + 1) / blocks)) if first else None,
    )
    return of_slowest(gathered(samples))


# ---- whether two variants differ, or whether only the machine did
#
# Samples of alternating variants form pairs that were taken one right after the other. The interval
# is that of the median of the pairs' ratios, by order statistics. It assumes no distribution of
# times, because on a shared machine times are not normally distributed.


_DRAWS: Final = 1000
CONFIDENCE: Final = 0.95
SAME_WITHIN: Final = 0.05
"""If the interval contains 1 and is narrower than this, the two count as equal."""


@dataclass(frozen=True, slots=True)
class Comparison:
    ratio: float
    """The ratio of the medians."""
    low: float
    high: float
    """The ratio is between these two with 95 % confidence."""

    @property
    def noise(self) -> float:
        """Half the interval, relative to the ratio."""
        return (self.high - self.low) / 2 / self.ratio

    @property
    def only_noise(self) -> bool:
        """Whether the samples show neither which of the two takes longer nor that they are
        equal."""
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
    """Compares `one` with `other`, whose samples form pairs."""
    ratio = median(one) / median(other)
    pairs = sorted(a / b for a, b in zip(one, other, strict=True))
    low, high = interval(len(pairs))
    return Comparison(ratio, min(ratio, pairs[low]), max(ratio, pairs[high]))


def compare_apart(one: Sequence[float], other: Sequence[float]) -> Comparison:
    """Like `compare`, for samples of two runs, which form no pairs: uses a bootstrap."""
    import numpy as np

    generator = np.random.default_rng(0)

    def medians(samples: Sequence[float]) -> NDArray[np.float64]:
        drawn = generator.choice(np.asarray(samples, float), (_DRAWS, len(samples)))
        return np.asarray(np.median(drawn, axis=1), np.float64)

    ratio = median(one) / median(other)
    low, high = np.percentile(medians(one) / medians(other), [2.5, 97.5])
    return Comparison(ratio, min(ratio, float(low)), max(ratio, float(high)))


def against_plain(samples: Mapping[str, Timings], variant: str = "sealed") -> Comparison | None:
    plain, one = samples.get("plain"), samples.get(variant)
    return compare(one.seconds, plain.seconds) if plain and one else None


def interval(count: int) -> tuple[int, int]:
    """The indices in `count` sorted samples between which the median is with CONFIDENCE.

    Fewer than six samples are not enough for that; then the interval is from first to last.
    """
    outside = 0.0
    cut = 0
    while cut < (count - 1) // 2:
        outside += 2 * math.comb(count, cut) / 2**count
        if outside > 1 - CONFIDENCE:
            break
        cut += 1
    return max(0, cut - 1), count - 1 - max(0, cut - 1)


# ---- a figure and its target


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One figure, with its target if there is one."""

    part: str
    what: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    detail: str = ""
    low: float | None = None
    high: float | None = None
    """The interval of a ratio with 95 % confidence."""

    @property
    def met(self) -> bool | None:
        if self.at_least is not None:
            return self.value >= self.at_least
        return None if self.at_most is None else self.value <= self.at_most

    @property
    def bar(self) -> str:
        if self.at_least is not None:
            return f"≥ {self.at_least:g}"
        return "-" if self.at_most is None else f"≤ {self.at_most:g}"

    @property
    def reached(self) -> float | None:
        """How many times as good as its target the value is; 1 is just good enough."""
        if self.at_least is not None:
            return self.value / self.at_least
        return self.at_most / self.value if self.at_most is not None and self.value else None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


# ---- jobs, what they measured, and the results file


Section = Literal["aead", "link", "allreduce", "collectives", "step", "gpu", "scale"]


class Measured(Protocol):
    """What was measured alternately in one run."""

    @property
    def section(self) -> Section: ...
    @property
    def cases(self) -> Sequence[Any]:
        """The cases for the results file, one for each variant."""
        ...


@dataclass(frozen=True, slots=True)
class Cases:
    section: Section
    cases: Sequence[Any]


@dataclass(frozen=True, slots=True)
class BenchJob:
    """The measurements of one world of workers."""

    label: str
    count: int
    """How many reports it will yield."""
    measure: Callable[[Progress], Iterator[Measured]]


def _table() -> str:
    """The table of algorithms of the workers, which inherit this environment."""
    settings = read_settings(os.environ)
    return format_table(settings.table.fixed_to(settings.algorithms), {})


@dataclass(slots=True)
class BenchSession:
    command: str
    path: Path | None = None
    """The results file; None if none was asked for."""
    measured: list[Measured] = field(default_factory=list)
    stopped: str | None = None
    """Why the session ended early, if it did."""
    _made: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    _algorithms: str = field(default_factory=_table)

    def run(self, jobs: Sequence[BenchJob], tell: Callable[[float, str], None]) -> None:
        """Runs the jobs; `tell` gets the number of finished cases and the name of the current job.

        The file is written after each job, when no workers run. So what was measured is kept
        however this process ends.
        """
        total = sum(job.count for job in jobs)
        for job in jobs:

            def progress(part: float, label: str = job.label) -> None:
                tell(len(self.measured) + part, label)

            progress(0.0)
            for measured in job.measure(progress):
                self.measured.append(measured)
            if len(self.measured) < total:
                self.save(f"it ended after {len(self.measured)} of {total} cases")
        self.save(None)

    def save(self, stopped: str | None) -> None:
        self.stopped = stopped
        if self.path is not None:
            write_results(self.path, self.results(stopped))

    def results(self, stopped: str | None = None) -> Results:
        sections: dict[Section, list[Any]] = {}
        for run, each in enumerate(self.measured):
            # Groups of light workers have no variants to compare, so their cases have no run.
            numbered = (c if each.section == "scale" else replace(c, run=run) for c in each.cases)
            sections.setdefault(each.section, []).extend(numbered)
        return Results(
            command=self.command,
            made=self._made,
            complete=stopped is None,
            stopped=stopped,
            machine=this_machine(),
            algorithms=self._algorithms,
            **sections,
        )


# ---- lower bounds for any schedule and protocol: the time of the cryptography on this machine
#
# a collective       the bytes that the busiest core seals and opens, at AES's rate
# forming a group    the signatures that a rank makes and verifies


def aes_rate(record_bytes: int = limits.RECORD_BYTES, runs: int = 400) -> float:
    """The bytes per second of AES-256-GCM on one core, sealing and opening data in the cache.

    The best of many runs, because it is a lower bound of times.
    """
    cipher = _native.Cipher(os.urandom(limits.KEY_BYTES))
    plain = np.zeros(record_bytes, np.uint8)
    sealed = np.zeros(record_bytes + limits.TAG_BYTES, np.uint8)
    here, there = plain.ctypes.data, sealed.ctypes.data
    seal = open_ = float("inf")
    for _ in range(runs):
        seal = min(seal, seconds_of(lambda: cipher.seal(here, record_bytes, there)))
        open_ = min(open_, seconds_of(lambda: cipher.open(there, record_bytes, here)))
    return 2 * record_bytes / (seal + open_)


def busiest_core(rank_bytes: Sequence[int], cores: int) -> int:
    """The least bytes that the busiest core seals and opens, from the bytes of each rank.

    A rank's work runs on one core. If there are more ranks than cores, they share them, at best
    evenly.
    """
    return max(max(rank_bytes), -(-sum(rank_bytes) // min(len(rank_bytes), cores)))


@cache
def signature_seconds(runs: int = 200) -> tuple[float, float]:
    """The seconds to make and to verify an Ed25519 signature on one core; the best of many runs."""
    key, message = Ed25519PrivateKey.generate(), bytes(128)
    signature, public = key.sign(message), key.public_key()
    return (
        min(seconds_of(lambda: key.sign(message)) for _ in range(runs)),
        min(seconds_of(lambda: public.verify(signature, message)) for _ in range(runs)),
    )


def forming_floor(groups: Sequence[int], strangers: int, handshakes: float) -> float:
    """The seconds of a rank's signatures, for groups of these sizes and its share of handshakes.

    A rank signs each group's transcript, verifies each other member's signature over it, and
    verifies the certificates of `strangers` peers. At its end of a TLS handshake it makes one
    signature and verifies two.
    """
    sign, verify = signature_seconds()
    made = len(groups) + handshakes
    verified = sum(size - 1 for size in groups) + strangers + 2 * handshakes
    return made * sign + verified * verify
