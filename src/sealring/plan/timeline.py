"""One training step: gradients are exchanged while backward still computes, as far as that goes.

All ranks do the same at the same time. On a host, computing and the engines share the cores (on a
GPU: the GPU), and when more is wanted than there is, all of it slows down alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

MOVED_AFTER_S: Final = 0.5e-3
"""Linux moves no thread to another core that has run within this time (sched_migration_cost)."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Seconds of one rank's step without communication, all ranks of its host computing."""

    forward_s: float
    backward_s: float
    optimizer_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective of a step."""

    ready: float
    """The part of backward after which it can begin."""
    seconds: float
    """By itself, with a core for every engine."""
    busy_s: float
    """Of these, what needs the core."""
    threads: int = 1
    """That share it: so many cores are needed at a time."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Who competes for the cores of a host."""

    cores: float
    ranks: int
    yields: bool = False
    """True: an engine that waits yields its core and does not sleep, as sealring's do on CPUs. It
    then stays on that core. A thread that sleeps is woken on a core that is free, so the cores have
    even shares of such ranks."""
    settled: bool = True
    """False: so shortly after it woke up that no rank has been moved to another core yet."""

    @property
    def on_a_core(self) -> float:
        """Ranks on the busiest core: in a collective all wait for those. So three that yield take
        as long on two cores as four."""
        even = max(1.0, self.ranks / self.cores)
        if not self.yields:
            return even
        if self.settled or even == 1.0:
            return float(math.ceil(even))
        return float(_busiest(self.ranks, max(1, int(self.cores))))

    @property
    def turns(self) -> float:
        """How often route.turn_s passes when an engine has run out of records: for each further
        rank on its core; where engines yield, once, since what others do meanwhile is work."""
        further = self.on_a_core - 1.0
        return min(further, 1.0) if self.yields else further

    def speed(self, computing: bool, part: float, threads: int = 1) -> float:
        """Of every thread, where each rank's engines would be at work `part` of their time if each
        had a core for itself. One that is slowed is at work for longer, and waits no longer."""
        if part <= 0.0:
            return min(1.0, self.cores / self.ranks) if computing else 1.0
        # Of a rank. Computing goes on for so long that it is moved from core to core.
        cores = self.cores / self.ranks
        if not computing and self.on_a_core > 1.0:
            cores = 1.0 / self.on_a_core
        slow, fast = 0.0, 1.0
        for _ in range(40):
            middle = (slow + fast) / 2
            at_work = part / (part + (1.0 - part) * middle)
            if middle * (float(computing) + threads * at_work) > cores:
                fast = middle
            else:
                slow = middle
        return fast


@lru_cache(maxsize=64)
def _busiest(ranks: int, cores: int) -> int:
    """How many ranks share the busiest core if each is on any core: the median."""
    for most in range(1, ranks):
        ways = [1.0] + [0.0] * ranks  # by the ranks that have a core so far, over ranks' factorial
        for _ in range(cores):
            ways = [
                sum(ways[n - k] / math.factorial(k) for k in range(min(n, most) + 1))
                for n in range(ranks + 1)
            ]
        if ways[ranks] * math.factorial(ranks) >= 0.5 * cores**ranks:
            return most
    return ranks


@dataclass(frozen=True, slots=True)
class Step:
    seconds: float
    communicating_s: float
    exposed_s: float
    """Of these, while nothing was computed."""
    slowed_s: float
    """By how much computing took longer because engines shared its cores."""

    @property
    def hidden_s(self) -> float:
        return self.communicating_s - self.exposed_s


def run_step(
    compute: Compute, exchanges: Sequence[Exchange], sharing: Sharing, *, overlaps: bool = True
) -> Step:
    """`exchanges` run one at a time, in their order, as DDP and the engines have it."""
    alone = sharing.speed(True, 0.0)
    now, progress = compute.forward_s, 0.0
    slowed = communicating = exposed = 0.0
    for exchange in exchanges:
        due = (exchange.ready if overlaps else 1.0) * compute.backward_s
        if progress < due:  # nothing to send yet: backward has the cores to itself
            now += due - progress
            progress = due
        part = exchange.busy_s / exchange.seconds if exchange.seconds > 0 else 0.0
        left = exchange.seconds
        while left > 0:
            computing = progress < compute.backward_s
            speed = sharing.speed(computing, part, exchange.threads)
            # Only what needs the core is slowed; waiting for a link takes as long as before.
            stretch = part / speed + (1.0 - part)
            took = left * stretch
            if computing:
                pace = speed / alone
                until_done = (compute.backward_s - progress) / pace
                took = min(took, until_done)
                progress = compute.backward_s if took == until_done else progress + took * pace
                slowed += took * (1.0 - pace)
            else:
                exposed += took
            now += took
            communicating += took
            left -= took / stretch
            if left < 1e-12:
                break
    now += compute.backward_s - progress
    return Step(now + compute.optimizer_s, communicating, exposed, slowed)
