"""How long one collective takes: the programs that the engines run, simulated.

Small worlds run whole. Large ones are symmetric, and long tensors repeat: beyond a few ranks each
further one, and beyond a few segments each further one, adds the same time again. So the clock runs
at a few small worlds and few segments, and the rest is a straight line through them. The tests hold
these lines to simulations of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from sealring._native import STRIPE_SEGMENTS
from sealring.core.engine.engine import largest_segment
from sealring.core.engine.lanes import MAX_LANED_WORLD, lanes_for
from sealring.core.schedule import (
    Algorithm,
    Operation,
    Topology,
    chunks,
    cuts_into_chunks,
    program_for,
    segment_bytes,
)
from sealring.lab.plan.simulate import WINDOW, Costs, Outcome, simulate

_FEW_RANKS: Final = (8, 12)
_FEW_HOSTS: Final = (2, 4)
_FEW_ON_A_HOST: Final = (4, 8)
_FEW_IN_TREES: Final = (32, 64)
_LARGE_HOST: Final = 8
_WHOLE: Final = 12
"""Up to so many ranks, and so many segments, nothing is extrapolated."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """So many ranks, and how many of them share a host."""

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
    """How an engine cuts what it sends."""

    record_bytes: int
    """The most in one record; 0: every slot travels whole, whatever its length."""
    by_world: bool
    """True: as the CPU engine does, into equal parts and smaller ones in large worlds."""
    threads: int = 1
    """That a rank may use for a large tensor."""

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
) -> Outcome:
    """Of a tensor of `nbytes` bytes: the whole one in an all-reduce or a broadcast, one rank's part
    in an all-gather or a reduce-scatter. Where lanes share it: of the first lane."""
    if cluster.ranks == 1:
        return Outcome(0.0, 0.0, 0.0)
    ringless = algorithm is not Algorithm.RING
    if ringless and cluster.ranks > _WHOLE and (grid := _neighbours(nbytes)) is not None:
        # Where lines are drawn anyway, one more: between sizes that are powers of two. Not for
        # rings, whose time steps up with every further window of segments.
        ends = [
            (float(size), collective(operation, algorithm, cluster, size, costs, cutting))
            for size in grid
        ]
        return _line(ends, nbytes)
    slot = longest_slot(operation, algorithm, cluster, nbytes)
    segments = cutting.segments(slot, cluster.ranks)
    size = slot / segments
    # The first lane has the most. Each is an engine of its own, with pipes of its own.
    lanes = lanes_of(operation, algorithm, cluster, slot, cutting)
    rounds, rest = divmod(segments, STRIPE_SEGMENTS * lanes)
    segments = rounds * STRIPE_SEGMENTS + min(STRIPE_SEGMENTS, rest)

    def at(world: Cluster, count: int) -> Outcome:
        return _run(operation, algorithm, world, size * count, count, costs)

    def along_segments(world: Cluster) -> Outcome:
        if segments <= _WHOLE:
            return at(world, segments)
        # A window of segments is under way at a time, so what repeats is a window.
        few = 2 * WINDOW + segments % WINDOW
        return _line([(count, at(world, count)) for count in (few, few + WINDOW)], segments)

    if algorithm is Algorithm.TREE:
        return _tree(cluster, along_segments)
    if cluster.ranks <= _WHOLE:
        return along_segments(cluster)
    if cluster.hosts == 1 or cluster.per_host == 1:
        few = [Cluster(ranks, min(cluster.per_host, ranks)) for ranks in _FEW_RANKS]
        return _line([(each.ranks, along_segments(each)) for each in few], cluster.ranks)

    def along_hosts(per_host: int) -> Outcome:
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


def _tree(cluster: Cluster, run: Callable[[Cluster], Outcome]) -> Outcome:
    """A tree grows by a level whenever the world doubles."""
    few = [Cluster(ranks, min(cluster.per_host, ranks)) for ranks in _FEW_IN_TREES]
    if cluster.ranks <= few[1].ranks:
        return run(cluster)
    return _line([(math.log2(f.ranks), run(f)) for f in few], math.log2(cluster.ranks))


def _line(points: list[tuple[float, Outcome]], where: float) -> Outcome:
    (x0, low), (x1, high) = points
    part = (where - x0) / (x1 - x0)

    def extended(a: float, b: float) -> float:
        return a + (b - a) * part

    return Outcome(
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
) -> Outcome:
    hosts = cluster.host_of()
    programs = [
        program_for(operation, algorithm, cluster.ranks, rank, topology=_topology(algorithm, hosts))
        for rank in range(_unit(algorithm, cluster))
    ]
    return simulate(programs, slot, segments, costs, hosts)


def lanes_of(
    operation: Operation, algorithm: Algorithm, cluster: Cluster, slot: float, cutting: Cutting
) -> int:
    """Threads that share a tensor with such slots, a stripe of segments each in turn."""
    peers = _most_peers(operation, algorithm, cluster) if cutting.threads > 1 else 1
    return lanes_for(slot, cluster.ranks, cutting.threads, peers)


@lru_cache(maxsize=4096)
def _most_peers(operation: Operation, algorithm: Algorithm, cluster: Cluster) -> int:
    """With how many others a rank exchanges records: the first, which no other exceeds."""
    if cluster.ranks > MAX_LANED_WORLD:
        return cluster.ranks - 1
    topology = _topology(algorithm, cluster.host_of())
    program = program_for(operation, algorithm, cluster.ranks, 0, topology=topology)
    return len({peer for step in program.steps for peer in step.peers} - {0})


def _topology(algorithm: Algorithm, hosts: tuple[int, ...]) -> Topology | None:
    return Topology(hosts) if algorithm is Algorithm.HIERARCHICAL else None


def _unit(algorithm: Algorithm, cluster: Cluster) -> int:
    """How many ranks stand for all; those algorithms in which ranks differ are run whole."""
    if algorithm in (Algorithm.TREE, Algorithm.DIRECT) or not cluster.even:
        return cluster.ranks
    if algorithm is Algorithm.RING:
        return 1 if cluster.hosts == 1 else cluster.per_host
    # Here they differ in the order in which they add up, a little: small worlds can afford it.
    return cluster.ranks if cluster.ranks <= _WHOLE else cluster.per_host
