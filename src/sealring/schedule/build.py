"""From (operation, algorithm, world, rank) to the program; the only door to ring and direct."""

from __future__ import annotations

from functools import lru_cache

from sealring.errors import Unsupported
from sealring.schedule import direct, ring
from sealring.schedule.program import Algorithm, Operation, Program

_REDUCING = frozenset({Operation.ALL_REDUCE, Operation.REDUCE_SCATTER})


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
) -> Program:
    """The program of one rank. What its slots are is said at ring.py's and direct.py's functions.

    `average` ends the reduction with a division by the world, `premultiply` begins it with a
    multiplication of this rank's contribution; both are for the operations that reduce.
    """
    if (average or premultiply) and operation not in _REDUCING:
        raise Unsupported(f"{operation.name} reduces nothing, so it can neither average nor scale")
    if not 0 <= root < world:
        raise Unsupported(f"root {root} is not in a world of {world}")
    if root and operation is not Operation.BROADCAST:
        raise Unsupported(f"{operation.name} has no root")
    match operation, algorithm:
        case Operation.ALL_REDUCE, Algorithm.RING:
            return ring.all_reduce(world, rank, average=average, premultiply=premultiply)
        case Operation.ALL_REDUCE, Algorithm.DIRECT:
            return direct.all_reduce(world, rank, average=average, premultiply=premultiply)
        case Operation.REDUCE_SCATTER, Algorithm.RING:
            return ring.reduce_scatter(world, rank, average=average, premultiply=premultiply)
        case Operation.REDUCE_SCATTER, Algorithm.DIRECT:
            return direct.reduce_scatter(world, rank, average=average, premultiply=premultiply)
        case Operation.ALL_GATHER, Algorithm.RING:
            return ring.all_gather(world, rank)
        case Operation.ALL_GATHER, Algorithm.DIRECT:
            return direct.all_gather(world, rank)
        case Operation.BROADCAST, Algorithm.RING:
            return ring.broadcast(world, rank, root=root)
        case Operation.BROADCAST, Algorithm.DIRECT:
            return direct.broadcast(world, rank, root=root)
        case Operation.BARRIER, Algorithm.DIRECT:
            return direct.barrier(world, rank)
    raise Unsupported(f"{operation.name} has no {algorithm.name} algorithm")


def input_slots(operation: Operation, world: int) -> frozenset[int]:
    """The slots that hold the caller's input apart from its output: read, never written."""
    if operation is Operation.REDUCE_SCATTER:
        return frozenset(range(world))
    if operation is Operation.ALL_GATHER:
        return frozenset({world})
    return frozenset()
