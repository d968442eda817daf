"""One training step: gradients are exchanged while backward still computes, as far as that goes.

All ranks do the same at the same time. On a host, computing and the engines share the cores (on a
GPU: the GPU), and when more is wanted than there is, all of it slows down alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class Sharing:
    """Who competes for the cores of a host."""

    cores: float
    ranks: int

    @property
    def sharers(self) -> float:
        """Further ranks on each rank's core."""
        return max(0.0, self.ranks / self.cores - 1.0)

    def speed(self, computing: bool, part: float) -> float:
        """Of every thread, where each rank's engine would be at work `part` of its time if it had
        a core for itself. An engine that is slowed is at work for longer, and waits no longer."""
        if part <= 0.0:
            return min(1.0, self.cores / self.ranks) if computing else 1.0
        slow, fast = 0.0, 1.0
        for _ in range(40):
            middle = (slow + fast) / 2
            at_work = part / (part + (1.0 - part) * middle)
            if middle * self.ranks * (float(computing) + at_work) > self.cores:
                fast = middle
            else:
                slow = middle
        return fast


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
            speed = sharing.speed(computing, part)
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
