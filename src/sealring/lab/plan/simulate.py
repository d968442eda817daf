"""Runs programs without data, by a clock: how long a collective takes on machines not there yet.

A rank has an engine, which does one thing at a time (seal, open, reduce, copy), a way out and a way
in, each of which carries one record at a time. A record leaves when it is sealed, travels, and can
be opened when the step that takes it may run. All else is the programs' own order, as program.py
has it: dependencies, segments in order, a window of open segments.

Large worlds are symmetric: what rank r does, rank r + unit does at the same time. So it is enough
to run `unit` ranks; what they send to others comes back to them as what those others send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from sealring._native import SEGMENT_WINDOW
from sealring.core.schedule import Action, Program, Step
from sealring.core.schedule.execution import RECEIVING, SENDING
from sealring.errors import ScheduleError

WINDOW: Final = SEGMENT_WINDOW
"""Segments open at a time."""


@dataclass(frozen=True, slots=True)
class Hop:
    """What it takes to bring one record from one rank to another.

    Those that begin with engine_ keep a rank's engine busy, seconds per byte or per record; the
    others pass beside it.
    """

    latency_s: float
    link_s_per_byte: float
    engine_send_s: float = 0.0
    engine_receive_s: float = 0.0
    engine_push_s_per_byte: float = 0.0
    """To send what this rank has sealed."""
    engine_forward_s_per_byte: float = 0.0
    """To send on what another rank has sealed."""
    engine_pull_s_per_byte: float = 0.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds per byte of the engine's own work, and what hops inside and between hosts cost."""

    seal: float
    open: float
    reduce: float
    copy: float
    inside: Hop
    between: Hop
    turn_s: float = 0.0
    """Of an engine that had nothing to do, to take up a record: it had given its core to another
    rank. 0 where no core is shared."""


@dataclass(frozen=True, slots=True)
class Outcome:
    seconds: float
    """Until the last rank is done."""
    engine_s: float
    """What the busiest engine did in that time."""
    out_bytes: float
    """What the busiest rank sent."""


def simulate(
    programs: Sequence[Program],
    slot_bytes: float,
    segments: int,
    costs: Costs,
    host_of: Sequence[int],
    *,
    window: int = WINDOW,
) -> Outcome:
    """Runs the programs of the first ranks, all slots `slot_bytes` long, in `segments` segments.

    If there are fewer programs than the world has ranks, their number is the unit of symmetry.
    """
    unit, world = len(programs), programs[0].world
    if world % unit:
        raise ScheduleError(f"{unit} ranks do not stand for a world of {world}")
    size = slot_bytes / segments
    # A turn is one step of one rank in one segment. Turns are numbered rank by rank and segment by
    # segment, so that lists can hold what is known of them.
    counts = [len(program.steps) for program in programs]
    first = [0]
    for count in counts:
        first.append(first[-1] + count * segments)
    receivers = _receivers(programs)
    work: list[list[float]] = []
    deliveries: list[list[list[tuple[int, int, float, float]]]] = []
    for program in programs:
        plans = [
            _plan(program, step, size, costs, host_of, unit, receivers) for step in program.steps
        ]
        work.append([plan[0] for plan in plans])
        deliveries.append(
            [
                [(to, index, hop.latency_s, size * hop.link_s_per_byte) for to, index, hop in sent]
                for _, sent in plans
            ]
        )
    dependents = [program.dependents() for program in programs]
    turns = [
        [costs.turn_s if step.action in RECEIVING else 0.0 for step in program.steps]
        for program in programs
    ]

    waits: list[int] = []
    for program in programs:
        base = [len(step.after) + (step.action in RECEIVING) for step in program.steps]
        for segment in range(segments):
            besides = (segment > 0) + (segment >= window)
            waits += [each + besides for each in base]
    ready = [0.0] * len(waits)
    events = [(0.0, turn) for turn, count in enumerate(waits) if count == 0]
    left = [[count] * segments for count in counts]
    latest = [[0.0] * segments for _ in counts]
    engine_free, engine_busy = [0.0] * unit, [0.0] * unit
    out_free, in_free, out_records = [0.0] * unit, [0.0] * unit, [0] * unit
    rank_of = [rank for rank, count in enumerate(counts) for _ in range(count * segments)]
    done = 0

    def release(turn: int, at: float) -> None:
        if at > ready[turn]:
            ready[turn] = at
        waits[turn] -= 1
        if waits[turn] == 0:
            heappush(events, (ready[turn], turn))

    while events:
        start, turn = heappop(events)
        rank = rank_of[turn]
        count = counts[rank]
        segment, index = divmod(turn - first[rank], count)
        free = engine_free[rank]
        takes = work[rank][index]
        if start >= free:
            takes += turns[rank][index]
        end = (free if free > start else start) + takes
        engine_free[rank] = end
        engine_busy[rank] += takes
        for there, step, latency, carry in deliveries[rank][index]:
            leave = max(end, out_free[rank])
            out_free[rank] = leave + carry
            out_records[rank] += 1
            arrival = max(leave + latency, in_free[there]) + carry
            in_free[there] = arrival
            release(first[there] + segment * counts[there] + step, arrival)
        base_turn = turn - index
        for later in dependents[rank][index]:
            release(base_turn + later, end)
        if segment + 1 < segments:
            release(turn + count, end)
        if end > latest[rank][segment]:
            latest[rank][segment] = end
        left[rank][segment] -= 1
        if left[rank][segment] == 0 and segment + window < segments:
            opened = base_turn + window * count
            for each in range(opened, opened + count):
                release(each, latest[rank][segment])
        done += 1
    if done != len(waits):
        raise ScheduleError("the simulated programs wait for each other in a circle")
    return Outcome(max(engine_free), max(engine_busy), max(out_records) * size)


_Key = tuple[int, int, int, int]
"""(receiver, sender, origin, message) of a record."""
_Receivers = dict[_Key, int]
_Plan = tuple[float, list[tuple[int, int, Hop]]]


def _receivers(programs: Sequence[Program]) -> _Receivers:
    return {
        (program.rank, step.peers[0], step.origin, step.message): index
        for program in programs
        for index, step in enumerate(program.steps)
        if step.action in RECEIVING
    }


def _plan(
    program: Program,
    step: Step,
    size: float,
    costs: Costs,
    host_of: Sequence[int],
    unit: int,
    receivers: _Receivers,
) -> _Plan:
    """How long the step keeps the engine busy, and (receiver, its step, hop) of what it sends."""
    rank, world = program.rank, program.world

    def hop_to(peer: int) -> Hop:
        return costs.inside if host_of[rank] == host_of[peer] else costs.between

    if step.action in SENDING:
        sealed = step.action is not Action.FORWARD
        work = size * costs.seal if sealed else 0.0
        deliveries = []
        for peer in step.peers:
            hop = hop_to(peer)
            push = hop.engine_push_s_per_byte if sealed else hop.engine_forward_s_per_byte
            work += hop.engine_send_s + size * push
            origin = {Action.SEND: -1, Action.PUBLISH: rank}.get(step.action, step.origin)
            # The rank that is as far behind `peer` as this one stands in for it.
            turn = peer // unit * unit
            there, here = peer - turn, (rank - turn) % world
            turned = origin if origin < 0 else (origin - turn) % world
            index = receivers.get((there, here, turned, (step.message - turn) % world))
            if index is None:  # message numbers that are no ranks stay as they are
                index = receivers.get((there, here, turned, step.message))
            if index is None:
                raise ScheduleError(f"no rank receives message {step.message} of rank {rank}")
            deliveries.append((there, index, hop))
        return work, deliveries
    if step.action in RECEIVING:
        hop = hop_to(step.peers[0])
        work = hop.engine_receive_s + size * (hop.engine_pull_s_per_byte + costs.open)
        if step.action is Action.RECEIVE_REDUCE:
            work += size * costs.reduce
        return work, []
    return size * (costs.copy if step.action is Action.COPY else costs.reduce), []
