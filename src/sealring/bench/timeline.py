"""Where one training step's time went: computing, and communication beside it or instead of it.

DDP starts the last bucket's all-reduce when the last gradient is there. What runs after that, or
before the backward pass, keeps the model waiting (exposed); what runs in between is hidden behind
the backward pass. Ranks that have one core for both pay for what is hidden as well: their
backward pass takes longer, which shows as computing that takes longer than by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from sealring.results import Part, Span

if TYPE_CHECKING:
    from sealring._native import Account
    from sealring.recorder import CollectiveAccount

PARTS: Final[tuple[Literal["seal", "transfer", "open", "reduce", "wait"], ...]] = (
    "seal", "transfer", "open", "reduce", "wait"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stamps:
    """When the phases of a step ended, in nanoseconds of the monotonic clock."""

    start: int
    forward: int
    backward: int
    end: int


@dataclass(frozen=True, slots=True)
class Ran:
    """One collective of a step, by the same clock."""

    name: str
    bytes: int
    queued: int
    started: int
    ended: int


def ran_in(stamps: Stamps, collectives: Sequence[CollectiveAccount]) -> list[Ran]:
    """Those of a step, from a flight record whose times are the monotonic clock's."""
    return [
        Ran(each.operation, each.bytes or 0, each.queued_ns, each.started_ns, each.ended_ns)
        for each in collectives
        if each.started_ns is not None
        and each.ended_ns is not None
        and stamps.start <= each.started_ns
        and each.ended_ns <= stamps.end
    ]


def computed_until(stamps: Stamps, ran: Sequence[Ran]) -> int:
    """When the last gradient was there."""
    queued = [each.queued for each in ran if stamps.forward <= each.queued <= stamps.backward]
    return max(queued, default=stamps.backward)


def exposed_ns(stamps: Stamps, ran: Sequence[Ran]) -> int:
    until = computed_until(stamps, ran)
    total = 0
    for each in ran:
        hidden = min(each.ended, until) - max(each.started, stamps.forward)
        total += (each.ended - each.started) - max(0, hidden)
    return total


def parts_of(stamps: Stamps, ran: Sequence[Ran], before: Account, after: Account) -> list[Part]:
    """The engine says what its time went into, the flight record how much of it was exposed; that
    part is taken to be the same for all of them."""
    exposed = exposed_ns(stamps, ran) * 1e-9
    busy = sum(each.ended - each.started for each in ran) * 1e-9
    share = exposed / busy if busy else 0.0
    spent = {
        "seal": after["seal_s"] - before["seal_s"],
        "transfer": after["transfer_s"] - before["transfer_s"],
        "open": after["open_s"] - before["open_s"],
        "reduce": after["reduce_s"] - before["reduce_s"],
        "wait": after["wait_s"] - before["wait_s"],
    }
    step = (stamps.end - stamps.start) * 1e-9
    engine = sum(spent.values())
    return [
        Part("compute", max(0.0, step - share * engine), 0.0),
        *(Part(name, share * spent[name], (1 - share) * spent[name]) for name in PARTS),
    ]


def spans_of(stamps: Stamps, ran: Sequence[Ran]) -> list[Span]:
    def span(lane: Literal["compute", "collective"], name: str, *times: int, size: int = 0) -> Span:
        start, end = ((each - stamps.start) * 1e-9 for each in times)
        return Span(lane, name, start, end, size)

    return [
        span("compute", "forward", stamps.start, stamps.forward),
        span("compute", "backward", stamps.forward, computed_until(stamps, ran)),
        span("compute", "optimizer", stamps.backward, stamps.end),
        *(span("collective", each.name, each.started, each.ended, size=each.bytes) for each in ran),
    ]


def profiled(step: Callable[[], object], path: Path) -> None:
    """Runs the step under torch's profiler, which writes a Chrome trace of all threads."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile, supported_activities

    possible = supported_activities()  # type: ignore[no-untyped-call]
    wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & possible
    # Collectives run on the group's own thread, which a profiler leaves out unless it is told.
    all_threads = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=list(wanted), experimental_config=all_threads) as profiler:
        step()
    profiler.export_chrome_trace(str(path))
