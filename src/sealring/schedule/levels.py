"""In which exchange a record goes, where GPUs exchange records (native/collective/rounds.hpp).

A record's level is the number of exchanges of the same segment that must be complete before it can
be sealed. Both ends of a message must know it, and it depends on what other ranks do before: so it
is worked out from the programs of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from sealring.schedule.build import program_for
from sealring.schedule.execution import RECEIVING, SENDING, Execution
from sealring.schedule.hierarchical import Topology
from sealring.schedule.program import Action, Algorithm, Operation, Program
from sealring.schedule.relayed import relayed


@dataclass(frozen=True, slots=True)
class Levels:
    of_steps: tuple[tuple[int, ...], ...]
    """By rank and step; 0 for a step that exchanges nothing."""
    count: int
    most_records: int
    """The most that a rank sends, or receives, by exchanges in one segment."""
    most_lent: int
    """The most that a rank seals for peers of its own host in one segment."""


def levels_of(programs: Sequence[Program], hosts: Sequence[int]) -> Levels:
    """`hosts` has a number for each rank's; records are exchanged between different ones.

    No step may have peers both there and here (relayed.py).
    """
    levels = [[0] * len(program.steps) for program in programs]
    complete = [[0] * len(program.steps) for program in programs]
    """By rank and step: the exchanges that are complete when the step is done."""
    sent: dict[tuple[int, int, int, int], int] = {}
    sending, receiving, lending = ([0] * len(programs) for _ in range(3))
    count = 1
    for rank, _, index in Execution(programs).turns():
        step = programs[rank].steps[index]
        before = max((complete[rank][earlier] for earlier in step.after), default=0)
        complete[rank][index] = before
        exchanged = any(hosts[peer] != hosts[rank] for peer in step.peers)
        if step.action in SENDING:
            origin = rank if step.action is Action.PUBLISH else step.origin
            for peer in step.peers:
                sent[rank, peer, origin, step.message] = before
            sending[rank] += exchanged
            lending[rank] += not exchanged
        elif step.action in RECEIVING:
            level = sent[step.peers[0], rank, step.origin, step.message]
            complete[rank][index] = max(before, level + exchanged)
            receiving[rank] += exchanged
        if exchanged:
            levels[rank][index] = level if step.action in RECEIVING else before
            count = max(count, levels[rank][index] + 1)
    most = max(1, *sending, *receiving)
    return Levels(tuple(map(tuple, levels)), count, most, max(0, *lending))


@lru_cache(maxsize=64)
def levels_for(
    operation: Operation,
    algorithm: Algorithm,
    hosts: tuple[int, ...],
    *,
    root: int = 0,
    average: bool = False,
    premultiply: bool = False,
    topology: Topology | None = None,
    relays: bool = False,
) -> Levels:
    """Those of the programs that `program_for` has for such a group; `relays`: relayed."""
    programs = [
        program_for(
            operation,
            algorithm,
            len(hosts),
            rank,
            root=root,
            average=average,
            premultiply=premultiply,
            topology=topology,
        )
        for rank in range(len(hosts))
    ]
    return levels_of([relayed(each) if relays else each for each in programs], hosts)
