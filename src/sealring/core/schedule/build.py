"""Makes the program for (operation, algorithm, world, rank); other code uses only this module."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from sealring import _native
from sealring.core.schedule import direct, hierarchical, ring, tree
from sealring.core.schedule.hierarchical import Topology, one_host, small_world
from sealring.core.schedule.program import REDUCING, ROOTED, Action, Algorithm, Operation, Program
from sealring.errors import Unsupported

# ---- where a tensor is cut: into chunks for the ranks, and chunks into segments

CACHE_LINE_BYTES: Final = 64
"""A multiple of every element's size, so that no element is cut in two."""
MIN_SEGMENT_BYTES: Final = 16 << 10
"""Below this size, a record's fixed cost (header, tag, system call) exceeds the gain of overlap."""
MIN_SEGMENTS: Final = 4
"""With at least this many records, unless they get too small, sealing and sending overlap."""


def chunks(
    elements: int, world: int, itemsize: int, align_bytes: int = CACHE_LINE_BYTES
) -> list[tuple[int, int]]:
    """(offset, length) in bytes of each rank's chunk, nearly equal; some may be empty.

    Chunks start at multiples of `align_bytes` unless the tensor is too small to give every rank
    that much; then they are cut between elements.
    """
    aligned = align_bytes % itemsize == 0 and elements * itemsize >= world * align_bytes
    quantum = align_bytes if aligned else itemsize
    total = elements * itemsize
    quanta, longer = divmod(-(-total // quantum), world)
    starts = [min(total, (rank * quanta + min(rank, longer)) * quantum) for rank in range(world)]
    ends = [*starts[1:], total]
    return [(start, end - start) for start, end in zip(starts, ends, strict=True)]


@lru_cache(maxsize=256)
def exchanged_bytes(most_records: int, half_bytes: int, longest: int) -> int:
    """The most plaintext per record, up to `longest`, so that all records fit into half the memory.

    Raises Unsupported if they cannot.
    """
    payload = min(longest, half_bytes // most_records)
    while _native.wire_area_bytes(most_records, payload) > half_bytes:
        payload -= CACHE_LINE_BYTES
    if payload < CACHE_LINE_BYTES:
        raise Unsupported(f"{most_records} records do not fit into {half_bytes} bytes")
    return payload // CACHE_LINE_BYTES * CACHE_LINE_BYTES


@lru_cache(maxsize=256)  # called in every collective, mostly with the same values
def segment_bytes(longest_slot_bytes: int | None, record_bytes: int) -> int:
    """Plaintext per record for a collective whose longest slot has `longest_slot_bytes` bytes.

    Segments get equal lengths, so that the last one is not a short rest. If ranks do not know each
    other's longest slot, it is None, and a segment is as long as a record may be.
    """
    largest = record_bytes // CACHE_LINE_BYTES * CACHE_LINE_BYTES
    if largest == 0:
        raise ValueError(f"a record of {record_bytes} bytes holds no {CACHE_LINE_BYTES}-byte line")
    if longest_slot_bytes is None:
        return largest
    segments = max(MIN_SEGMENTS, -(-longest_slot_bytes // largest))
    lines = -(-longest_slot_bytes // (segments * CACHE_LINE_BYTES))
    return min(largest, max(MIN_SEGMENT_BYTES, lines * CACHE_LINE_BYTES))


ALGORITHMS: Final[dict[Operation, tuple[Algorithm, ...]]] = {
    Operation.ALL_REDUCE: tuple(Algorithm),
    Operation.REDUCE_SCATTER: (Algorithm.RING, Algorithm.DIRECT, Algorithm.HIERARCHICAL),
    Operation.ALL_GATHER: (Algorithm.RING, Algorithm.DIRECT, Algorithm.HIERARCHICAL),
    Operation.BROADCAST: (
        Algorithm.RING, Algorithm.DIRECT, Algorithm.TREE, Algorithm.HIERARCHICAL
    ),
    Operation.BARRIER: (Algorithm.DIRECT, Algorithm.TREE),
    Operation.REDUCE: (
        Algorithm.RING, Algorithm.DIRECT, Algorithm.TREE, Algorithm.HIERARCHICAL
    ),
    Operation.GATHER: (Algorithm.DIRECT,),
    Operation.SCATTER: (Algorithm.DIRECT,),
    Operation.ALL_TO_ALL: (Algorithm.DIRECT,),
    Operation.INTRODUCTION: (Algorithm.TREE,),
    Operation.OBJECTION: (Algorithm.TREE,),
}  # fmt: skip
"""The possible algorithms of each operation. If every byte has one sender and one receiver, only
DIRECT makes sense: other algorithms would seal it twice, or publish it to all ranks."""

_CHUNKED: Final = frozenset({Algorithm.RING, Algorithm.PARAMETER_SERVER, Algorithm.HIERARCHICAL})


def cuts_into_chunks(operation: Operation, algorithm: Algorithm) -> bool:
    """Whether the tensor is passed as one slot per rank (layout.chunks) instead of a single
    slot."""
    return operation is Operation.ALL_REDUCE and algorithm in _CHUNKED


@lru_cache(maxsize=256)
def program_for(
    operation: Operation,
    algorithm: Algorithm,
    world: int,
    rank: int,
    *,
    root: int = 0,
    average: bool = False,
    premultiply: bool = False,
    topology: Topology | None = None,
) -> Program:
    """The program of one rank. The functions that write programs document their slots.

    `average` divides the result by the world; `premultiply` multiplies this rank's contribution by
    a factor first. Both are only for operations that reduce. `topology` is for the hierarchical
    algorithm; without it, all ranks are on one host.
    """
    if (average or premultiply) and operation not in REDUCING:
        raise Unsupported(f"{operation.name} reduces nothing, so it can neither average nor scale")
    if not 0 <= root < world:
        raise Unsupported(f"root {root} is not in a world of {world}")
    if root and operation not in ROOTED:
        raise Unsupported(f"{operation.name} has no root")
    if algorithm not in ALGORITHMS[operation]:
        raise Unsupported(f"{operation.name} has no {algorithm.name} algorithm")
    if topology is not None and len(topology.host_of) != world:
        raise Unsupported(f"a topology of {len(topology.host_of)} ranks in a world of {world}")
    hosts = topology or one_host(world)
    scaling = {"average": average, "premultiply": premultiply}
    match operation, algorithm:
        case Operation.ALL_REDUCE, Algorithm.RING:
            return ring.all_reduce(world, rank, **scaling)
        case Operation.ALL_REDUCE, Algorithm.DIRECT:
            return direct.all_reduce(world, rank, **scaling)
        case Operation.ALL_REDUCE | Operation.INTRODUCTION, Algorithm.TREE:
            return tree.all_reduce(operation, world, rank, **scaling)
        case Operation.ALL_REDUCE, Algorithm.PARAMETER_SERVER:
            return hierarchical.all_reduce(algorithm, one_host(world), world, rank, **scaling)
        case Operation.ALL_REDUCE, Algorithm.HIERARCHICAL:
            return hierarchical.all_reduce(algorithm, hosts, world, rank, **scaling)
        case Operation.REDUCE_SCATTER, Algorithm.RING:
            return ring.reduce_scatter(world, rank, **scaling)
        case Operation.REDUCE_SCATTER, Algorithm.DIRECT:
            return direct.reduce_scatter(world, rank, **scaling)
        case Operation.REDUCE_SCATTER, Algorithm.HIERARCHICAL:
            return hierarchical.reduce_scatter(hosts, world, rank, **scaling)
        case Operation.ALL_GATHER, Algorithm.RING:
            return ring.all_gather(world, rank)
        case Operation.ALL_GATHER, Algorithm.DIRECT:
            return direct.all_gather(world, rank)
        case Operation.ALL_GATHER, Algorithm.HIERARCHICAL:
            return hierarchical.all_gather(hosts, world, rank)
        case Operation.BROADCAST, Algorithm.RING:
            return ring.broadcast(world, rank, root=root)
        case Operation.BROADCAST, Algorithm.DIRECT:
            return direct.broadcast(world, rank, root=root)
        case Operation.BROADCAST, Algorithm.TREE:
            return tree.broadcast(world, rank, root=root)
        case Operation.BROADCAST, Algorithm.HIERARCHICAL:
            return hierarchical.broadcast(hosts, world, rank, root=root)
        case Operation.REDUCE, Algorithm.RING:
            return ring.reduce(world, rank, root=root, **scaling)
        case Operation.REDUCE, Algorithm.DIRECT:
            return direct.reduce(world, rank, root=root, **scaling)
        case Operation.REDUCE, Algorithm.TREE:
            return tree.reduce(world, rank, root=root, **scaling)
        case Operation.REDUCE, Algorithm.HIERARCHICAL:
            return hierarchical.reduce(hosts, world, rank, root=root, **scaling)
        case Operation.GATHER, _:
            return direct.gather(world, rank, root=root)
        case Operation.SCATTER, _:
            return direct.scatter(world, rank, root=root)
        case Operation.ALL_TO_ALL, _:
            return direct.all_to_all(world, rank)
        case Operation.OBJECTION, _:
            return tree.objection(world, rank, root=root)
        case Operation.BARRIER, Algorithm.TREE:
            return tree.barrier(world, rank)
        case _:
            return direct.barrier(world, rank)


@lru_cache(maxsize=256)
def passes_records_on(
    operation: Operation, algorithm: Algorithm, world: int, topology: Topology | None = None
) -> bool:
    """Whether any rank forwards records unchanged."""
    # A small world of the same kind gives the same answer. The programs of a large world have
    # millions of steps.
    like = small_world(topology or one_host(world))
    world = len(like.host_of)
    return any(
        step.action is Action.FORWARD
        for rank in range(world)
        for step in program_for(operation, algorithm, world, rank, topology=like).steps
    )


def input_slots(operation: Operation, world: int, *, is_root: bool = False) -> frozenset[int]:
    """The slots that hold only the caller's input: they are read and never written."""
    match operation:
        case Operation.REDUCE_SCATTER | Operation.ALL_TO_ALL:
            return frozenset(range(world))
        case Operation.ALL_GATHER:
            return frozenset({world})
        case Operation.REDUCE:
            return frozenset() if is_root else frozenset({0})
        case Operation.GATHER:
            return frozenset({world}) if is_root else frozenset({0})
        case Operation.SCATTER:
            return frozenset(range(world)) if is_root else frozenset()
    return frozenset()
