"""Counts rounds, traffic and fan-in of an all-reduce in the programs that the engines run.

rounds     the longest chain of records, each of which waits for the one before
sent       bytes that the busiest rank sends, as a part of the tensor
received   bytes that the busiest rank receives, as a part of the tensor
fan-in     the number of ranks from which the busiest rank receives records
peak       bytes that reach the busiest rank in one round, as a part of the tensor
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from sealring.core.schedule import (
    Algorithm,
    Operation,
    Program,
    Topology,
    cuts_into_chunks,
    program_for,
)
from sealring.core.schedule.execution import RECEIVING, SENDING, Execution


@dataclass(frozen=True, slots=True)
class Shape:
    rounds: int
    sent: Fraction
    received: Fraction
    fan_in: int
    peak: Fraction


def shape_of(algorithm: Algorithm, world: int, topology: Topology | None = None) -> Shape:
    programs = [
        program_for(Operation.ALL_REDUCE, algorithm, world, rank, topology=topology)
        for rank in range(world)
    ]
    part = Fraction(1, world if cuts_into_chunks(Operation.ALL_REDUCE, algorithm) else 1)
    return _counted(programs, part)


def _counted(programs: Sequence[Program], part: Fraction) -> Shape:
    depth: dict[tuple[int, int], int] = {}
    records: dict[tuple[int, int, int, int], int] = {}
    arriving: dict[tuple[int, int], Fraction] = defaultdict(Fraction)
    sent = [Fraction(0) for _ in programs]
    received = [Fraction(0) for _ in programs]
    sources: list[set[int]] = [set() for _ in programs]
    rounds = 0
    for turn in Execution(programs).turns():
        step = programs[turn.rank].steps[turn.step]
        chain = max((depth[turn.rank, earlier] for earlier in step.after), default=0)
        if step.action in SENDING:
            origin = {0: -1, 1: turn.rank}.get(int(step.action), step.origin)
            for peer in step.peers:
                records[turn.rank, peer, origin, step.message] = chain + 1
                sent[turn.rank] += part
        elif step.action in RECEIVING:
            source = step.peers[0]
            round_ = records[source, turn.rank, step.origin, step.message]
            chain = max(chain, round_)
            received[turn.rank] += part
            arriving[turn.rank, round_] += part
            sources[turn.rank].add(source)
            rounds = max(rounds, round_)
        depth[turn.rank, turn.step] = chain
    return Shape(
        rounds,
        max(sent),
        max(received),
        max(map(len, sources)),
        max(arriving.values(), default=Fraction(0)),
    )
