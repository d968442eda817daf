"""What all benchmarks share: samples taken in turn, whether they differ, the file that keeps them.

The variants of a case alternate in one run, so that whatever else the machine does slows all of
them alike. A benchmark is a Job: workers measure, and what they report becomes cases of a Results.
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
"""Gets the part of a case that is done, between 0 and 1."""


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
        return spread_of(self.seconds)


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
    """Yields what the workers report, except for parts done, which go to `progress`."""
    for _, report in run_workers(ranks, worker, *arguments, environment=environment):
        if not isinstance(report, float):
            yield report
        elif progress is not None:
            progress(report)


@contextmanager
def sealed_world() -> Iterator[Any]:
    """In a worker: the sealed group of all ranks, which they leave together."""
    import torch.distributed as dist

    dist.init_process_group("sealring")
    yield dist.group.WORLD
    dist.barrier()
    dist.destroy_process_group()


def gathered(own: Any) -> list[Any]:
    """In a worker: every rank's value, by rank."""
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
) -> dict[Key, Samples]:
    """In a worker: `alternate`, with the slowest rank's times. Rank 0 reports the parts done."""
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
# Samples of variants that alternate come in pairs taken right beside each other. The interval is
# that of the median of the pairs' ratios, by order statistics: it assumes nothing about how times
# are distributed, which on a shared machine is anything but normal.


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
    """Like `compare`, for samples of two runs, which come in no pairs: drawn again (bootstrap)."""
    import numpy as np

    generator = np.random.default_rng(0)

    def medians(samples: Sequence[float]) -> NDArray[np.float64]:
        drawn = generator.choice(np.asarray(samples, float), (_DRAWS, len(samples)))
        return np.asarray(np.median(drawn, axis=1), np.float64)

    ratio = median(one) / median(other)
    low, high = np.percentile(medians(one) / medians(other), [2.5, 97.5])
    return Comparison(ratio, min(ratio, float(low)), max(ratio, float(high)))


def against_plain(samples: Mapping[str, Samples], variant: str = "sealed") -> Comparison | None:
    plain, one = samples.get("plain"), samples.get(variant)
    return compare(one.seconds, plain.seconds) if plain and one else None


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


# ---- a figure and its bar


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, beside the bar that it has to reach if there is one."""

    part: str
    what: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    detail: str = ""
    low: float | None = None
    high: float | None = None
    """Where 19 of 20 repetitions would find a ratio."""

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
        """How many times as good as its bar; 1 is just good enough."""
        if self.at_least is not None:
            return self.value / self.at_least
        return self.at_most / self.value if self.at_most is not None and self.value else None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


# ---- what is to be measured, what was, and the file that keeps it


Section = Literal["aead", "link", "allreduce", "collectives", "step", "gpu", "scale"]


class Measured(Protocol):
    """What was measured alternately in one run."""

    @property
    def section(self) -> Section: ...
    @property
    def cases(self) -> Sequence[Any]:
        """As the results file holds them, one for each variant."""
        ...


@dataclass(frozen=True, slots=True)
class Cases:
    section: Section
    cases: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Job:
    """What one world of workers measures."""

    label: str
    count: int
    """How many it will yield."""
    measure: Callable[[Progress], Iterator[Measured]]


def _table() -> str:
    """What the workers, which inherit this environment, choose algorithms by."""
    settings = read_settings(os.environ)
    return format_table(settings.table.fixed_to(settings.algorithms), {})


@dataclass(slots=True)
class Session:
    command: str
    path: Path | None = None
    """Where the results go; None where no file was asked for."""
    measured: list[Measured] = field(default_factory=list)
    stopped: str | None = None
    """Why it ended early, once it has."""
    _made: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    _algorithms: str = field(default_factory=_table)

    def run(self, jobs: Sequence[Job], tell: Callable[[float, str], None]) -> None:
        """Measures; `tell` gets how many are done and what is under way.

        The file is written after each job, between two worlds of workers, where it takes no time
        from anybody: so what was measured is kept however this process ends.
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


# ---- what no schedule and no protocol can undercut: the cryptography itself, on this machine
#
# a collective       the bytes that the busiest core seals and opens, at AES's rate
# forming a group    the signatures that a rank makes and verifies


def aes_rate(record_bytes: int = limits.RECORD_BYTES, runs: int = 400) -> float:
    """Bytes a second of AES-256-GCM on one core, sealing and opening, from memory at hand.

    The best of many runs: the floor is what the core can do, whatever else runs on it.
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
    """What the busiest core seals and opens at least, given what each rank does.

    A rank's work is on one core; ranks that outnumber the cores share them, at best evenly.
    """
    return max(max(rank_bytes), -(-sum(rank_bytes) // min(len(rank_bytes), cores)))


@cache
def signature_seconds(runs: int = 200) -> tuple[float, float]:
    """To make an Ed25519 signature and to verify one, on one core; the best of many runs."""
    key, message = Ed25519PrivateKey.generate(), bytes(128)
    signature, public = key.sign(message), key.public_key()
    return (
        min(seconds_of(lambda: key.sign(message)) for _ in range(runs)),
        min(seconds_of(lambda: public.verify(signature, message)) for _ in range(runs)),
    )


def forming_floor(groups: Sequence[int], strangers: int, handshakes: float) -> float:
    """A rank's signatures, in seconds: for groups of these sizes and for its share of handshakes.

    It signs each group's transcript and verifies each other member's signature over it, verifies
    the certificates of `strangers`, and at its end of a TLS handshake makes one signature and
    verifies two.
    """
    sign, verify = signature_seconds()
    made = len(groups) + handshakes
    verified = sum(size - 1 for size in groups) + strangers + 2 * handshakes
    return made * sign + verified * verify
