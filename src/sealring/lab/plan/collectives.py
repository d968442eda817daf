"""Simulates how long a collective takes: runs the engines' programs without data, with a clock.

A rank has an engine, which does one thing at a time (seal, open, reduce, copy), and one way out and
one way in, each of which carries one record at a time. A record leaves when it is sealed, travels,
and is opened when the step that receives it may run. The rest follows from the rules of programs
(program.py): dependencies, segments in order, and a window of open segments.

Large worlds are symmetric: rank r + unit does the same as rank r at the same time. So it is enough
to run `unit` ranks. What they send to other ranks arrives at the ranks that stand for those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from typing import Final

from sealring._native import SEGMENT_WINDOW, STRIPE_SEGMENTS
from sealring.core.engine.engine import largest_segment
from sealring.core.engine.lanes import MAX_LANED_WORLD, lanes_for
from sealring.core.schedule import (
    Action,
    Algorithm,
    Operation,
    Program,
    Step,
    Topology,
    chunks,
    cuts_into_chunks,
    program_for,
    segment_bytes,
)
from sealring.core.schedule.execution import RECEIVING, SENDING, schedule_error

WINDOW: Final = SEGMENT_WINDOW
"""The number of segments that are open at a time."""


@dataclass(frozen=True, slots=True)
class Hop:
    """The costs of sending a record from one rank to another, in seconds per byte or per record.

    Costs that begin with engine_ occupy a rank's engine; the others do not.
    """

    latency_s: float
    link_s_per_byte: float
    engine_send_s: float = 0.0
    engine_receive_s: float = 0.0
    engine_push_s_per_byte: float = 0.0
    """The cost of sending what this rank has sealed."""
    engine_forward_s_per_byte: float = 0.0
    """The cost of forwarding what another rank has sealed."""
    engine_pull_s_per_byte: float = 0.0


@dataclass(frozen=True, slots=True)
class Costs:
    """The seconds per byte of the engine's own work, and the costs of hops."""

    seal: float
    open: float
    reduce: float
    copy: float
    inside: Hop
    between: Hop
    turn_s: float = 0.0
    """The time that an idle engine needs to begin with a record, if it has given its core to
    another rank. 0 if no core is shared."""


@dataclass(frozen=True, slots=True)
class Simulated:
    seconds: float
    """The time until the last rank is done."""
    engine_s: float
    """The working time of the busiest engine."""
    out_bytes: float
    """The bytes that the busiest rank sent."""


def simulate(
    programs: Sequence[Program],
    slot_bytes: float,
    segments: int,
    costs: Costs,
    host_of: Sequence[int],
    *,
    window: int = WINDOW,
) -> Simulated:
    """Simulates the programs of the first ranks. Slots have `slot_bytes` bytes in `segments`
    segments.

    If there are fewer programs than ranks in the world, their number is the unit of symmetry.
    """
    unit, world = len(programs), programs[0].world
    if world % unit:
        raise schedule_error(f"{unit} ranks do not stand for a world of {world}")
    size = slot_bytes / segments
    # A turn is one step of one rank in one segment. Turns are numbered by rank, then by segment, so
    # that lists can be indexed by them.
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
        raise schedule_error("the simulated programs wait for each other in a circle")
    return Simulated(max(engine_free), max(engine_busy), max(out_records) * size)


_Key = tuple[int, int, int, int]
"""The (receiver, sender, origin, message) of a record."""
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
    """Returns the engine's time for a step, and (receiver, its step, hop) for each sent record."""
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
            # By symmetry, another rank of the unit stands for `peer`.
            turn = peer // unit * unit
            there, here = peer - turn, (rank - turn) % world
            turned = origin if origin < 0 else (origin - turn) % world
            index = receivers.get((there, here, turned, (step.message - turn) % world))
            if index is None:  # a message number that is not a rank is not shifted
                index = receivers.get((there, here, turned, step.message))
            if index is None:
                raise schedule_error(f"no rank receives message {step.message} of rank {rank}")
            deliveries.append((there, index, hop))
        return work, deliveries
    if step.action in RECEIVING:
        hop = hop_to(step.peers[0])
        work = hop.engine_receive_s + size * (hop.engine_pull_s_per_byte + costs.open)
        if step.action is Action.RECEIVE_REDUCE:
            work += size * costs.reduce
        return work, []
    return size * (costs.copy if step.action is Action.COPY else costs.reduce), []


# ---- small worlds are simulated completely, large ones extrapolated
#
# Beyond a few ranks, and beyond a few segments, each further one adds the same time. So only a few
# small worlds and few segments are simulated, and the rest is a straight line through them. Tests
# compare these lines with complete simulations.


_FEW_RANKS: Final = (8, 12)
_FEW_HOSTS: Final = (2, 4)
_FEW_ON_A_HOST: Final = (4, 8)
_FEW_IN_TREES: Final = (32, 64)
_LARGE_HOST: Final = 8
_WHOLE: Final = 12
"""Up to this many ranks, and this many segments, nothing is extrapolated."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A number of ranks, and how many of them share a host."""

    ranks: int
    per_host: int

    @property
    def hosts(self) -> int:
        return -(-self.ranks // self.per_host)

    def host_of(self) -> tuple[int, ...]:
        return tuple(rank // self.per_host for rank in range(self.ranks))

    @property
    def even(self) -> bool:
        return self.ranks % self.per_host == 0


@dataclass(frozen=True, slots=True)
class Cutting:
    """How an engine cuts slots into records."""

    record_bytes: int
    """The most bytes in one record; 0: every slot is one record, whatever its length."""
    by_world: bool
    """Whether it cuts like the CPU engine: into equal parts, which are smaller in large worlds."""
    threads: int = 1
    """The threads that a rank may use for a large tensor."""

    def segments(self, slot_bytes: float, world: int) -> int:
        if not self.by_world:
            return max(1, math.ceil(slot_bytes / self.record_bytes)) if self.record_bytes else 1
        largest = min(self.record_bytes, largest_segment(world))
        size = segment_bytes(max(1, math.ceil(slot_bytes)), largest)
        return max(1, math.ceil(slot_bytes / size))


@lru_cache(maxsize=4096)
def collective(
    operation: Operation,
    algorithm: Algorithm,
    cluster: Cluster,
    nbytes: int,
    costs: Costs,
    cutting: Cutting,
) -> Simulated:
    """Simulates a collective of `nbytes` bytes: those of the whole tensor in an all-reduce or a
    broadcast, of one rank's part in an all-gather or a reduce-scatter. If lanes share it, the
    outcome is that of the first lane."""
    if cluster.ranks == 1:
        return Simulated(0.0, 0.0, 0.0)
    ringless = algorithm is not Algorithm.RING
    if ringless and cluster.ranks > _WHOLE and (grid := _neighbours(nbytes)) is not None:
        # Also interpolate between sizes that are powers of two. Not for rings, whose time grows in
        # steps with every further window of segments.
        ends = [
            (float(size), collective(operation, algorithm, cluster, size, costs, cutting))
            for size in grid
        ]
        return _line(ends, nbytes)
    slot = longest_slot(operation, algorithm, cluster, nbytes)
    segments = cutting.segments(slot, cluster.ranks)
    size = slot / segments
    # The first lane has the most segments. Each lane is a separate engine with its own pipes.
    lanes = lanes_of(operation, algorithm, cluster, slot, cutting)
    rounds, rest = divmod(segments, STRIPE_SEGMENTS * lanes)
    segments = rounds * STRIPE_SEGMENTS + min(STRIPE_SEGMENTS, rest)

    def at(world: Cluster, count: int) -> Simulated:
        return _run(operation, algorithm, world, size * count, count, costs)

    def along_segments(world: Cluster) -> Simulated:
        if segments <= _WHOLE:
            return at(world, segments)
        # A window of segments is open at a time, so the time repeats by windows.
        few = 2 * WINDOW + segments % WINDOW
        return _line([(count, at(world, count)) for count in (few, few + WINDOW)], segments)

    if algorithm is Algorithm.TREE:
        return _tree(cluster, along_segments)
    if cluster.ranks <= _WHOLE:
        return along_segments(cluster)
    if cluster.hosts == 1 or cluster.per_host == 1:
        few = [Cluster(ranks, min(cluster.per_host, ranks)) for ranks in _FEW_RANKS]
        return _line([(each.ranks, along_segments(each)) for each in few], cluster.ranks)

    def along_hosts(per_host: int) -> Simulated:
        # A host that is not full counts as full.
        if cluster.hosts <= _FEW_HOSTS[1]:
            return along_segments(Cluster(cluster.hosts * per_host, per_host))
        worlds = [(hosts, Cluster(hosts * per_host, per_host)) for hosts in _FEW_HOSTS]
        return _line([(h, along_segments(world)) for h, world in worlds], cluster.hosts)

    if cluster.per_host <= _LARGE_HOST:
        return along_hosts(cluster.per_host)
    return _line([(per, along_hosts(per)) for per in _FEW_ON_A_HOST], cluster.per_host)


def _neighbours(nbytes: int) -> tuple[int, int] | None:
    below = 1 << (nbytes.bit_length() - 1)
    return None if below == nbytes or nbytes < 1024 else (below, 2 * below)


def longest_slot(
    operation: Operation, algorithm: Algorithm, cluster: Cluster, nbytes: int
) -> float:
    if not cuts_into_chunks(operation, algorithm):
        return float(nbytes)
    if cluster.ranks <= _WHOLE:
        return float(max(length for _, length in chunks(-(-nbytes // 4), cluster.ranks, 4)))
    return max(4.0, nbytes / cluster.ranks)


def _tree(cluster: Cluster, run: Callable[[Cluster], Simulated]) -> Simulated:
    """The outcome for a tree, which gains a level whenever the world doubles."""
    few = [Cluster(ranks, min(cluster.per_host, ranks)) for ranks in _FEW_IN_TREES]
    if cluster.ranks <= few[1].ranks:
        return run(cluster)
    return _line([(math.log2(f.ranks), run(f)) for f in few], math.log2(cluster.ranks))


def _line(points: list[tuple[float, Simulated]], where: float) -> Simulated:
    (x0, low), (x1, high) = points
    part = (where - x0) / (x1 - x0)

    def extended(a: float, b: float) -> float:
        return a + (b - a) * part

    return Simulated(
        extended(low.seconds, high.seconds),
        extended(low.engine_s, high.engine_s),
        extended(low.out_bytes, high.out_bytes),
    )


@lru_cache(maxsize=4096)
def _run(
    operation: Operation,
    algorithm: Algorithm,
    cluster: Cluster,
    slot: float,
    segments: int,
    costs: Costs,
) -> Simulated:
    hosts = cluster.host_of()
    programs = [
        program_for(operation, algorithm, cluster.ranks, rank, topology=_topology(algorithm, hosts))
        for rank in range(_unit(algorithm, cluster))
    ]
    return simulate(programs, slot, segments, costs, hosts)


def lanes_of(
    operation: Operation, algorithm: Algorithm, cluster: Cluster, slot: float, cutting: Cutting
) -> int:
    """The number of threads that share a tensor with such slots."""
    peers = _most_peers(operation, algorithm, cluster) if cutting.threads > 1 else 1
    return lanes_for(slot, cluster.ranks, cutting.threads, peers)


@lru_cache(maxsize=4096)
def _most_peers(operation: Operation, algorithm: Algorithm, cluster: Cluster) -> int:
    """The number of peers of rank 0 in the program; no rank has more."""
    if cluster.ranks > MAX_LANED_WORLD:
        return cluster.ranks - 1
    topology = _topology(algorithm, cluster.host_of())
    program = program_for(operation, algorithm, cluster.ranks, 0, topology=topology)
    return len({peer for step in program.steps for peer in step.peers} - {0})


def _topology(algorithm: Algorithm, hosts: tuple[int, ...]) -> Topology | None:
    return Topology(hosts) if algorithm is Algorithm.HIERARCHICAL else None


def _unit(algorithm: Algorithm, cluster: Cluster) -> int:
    """How many ranks stand for all. Algorithms in which ranks differ are simulated completely."""
    if algorithm in (Algorithm.TREE, Algorithm.DIRECT) or not cluster.even:
        return cluster.ranks
    if algorithm is Algorithm.RING:
        return 1 if cluster.hosts == 1 else cluster.per_host
    # Ranks differ a little in the order of their sums: small worlds are simulated completely.
    return cluster.ranks if cluster.ranks <= _WHOLE else cluster.per_host
