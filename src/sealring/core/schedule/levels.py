"""Levels: which exchange carries a record, where GPUs exchange records
(native/collective/rounds.hpp).

A record's level is the number of exchanges of the same segment that must be complete before the
record can be sealed. If its receiver opens another record before it whose level is higher, it has
that level. Both ends of a message must know the level, and it depends on what other ranks do
before. So it is computed from the path of the record's chunk (paths.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Final

import numpy as np

from sealring.core.schedule.build import program_for
from sealring.core.schedule.execution import RECEIVING
from sealring.core.schedule.hierarchical import Topology, one_host
from sealring.core.schedule.paths import Paths, Ranks, paths_of
from sealring.core.schedule.program import (
    ROOTED,
    Action,
    Algorithm,
    Operation,
    Program,
    Step,
    relayed,
    relayed_message,
)

_DOWN: Final = frozenset(
    {
        Operation.ALL_REDUCE, Operation.ALL_GATHER, Operation.BROADCAST, Operation.BARRIER,
        Operation.SCATTER,
    }
)  # fmt: skip
"""The operations in which chunks are sent down from their homes."""
_DOWN_ALONE: Final = frozenset({Operation.ALL_GATHER, Operation.BROADCAST, Operation.SCATTER})


@dataclass(frozen=True, slots=True)
class Levels:
    """The levels of one rank's program."""

    of_steps: tuple[int, ...]
    """The level of each step; 0 for a step that exchanges nothing."""
    count: int
    """The number of levels. It and the next two are the maximum over the programs of all ranks."""
    most_records: int
    """The most records that a rank sends, or receives, by exchanges in one segment."""
    most_lent: int
    """The most records that a rank seals for peers of its own host in one segment."""


@lru_cache(maxsize=64)
def levels_for(
    operation: Operation,
    algorithm: Algorithm,
    hosts: tuple[int, ...],
    rank: int,
    *,
    root: int = 0,
    average: bool = False,
    premultiply: bool = False,
    topology: Topology | None = None,
    relays: bool = False,
) -> Levels:
    """The levels of one rank's program, for an operation that a script calls.

    `hosts` has a number for each rank's host; records are exchanged between ranks of different
    numbers. The program is that of `program_for`, or with `relays` its relayed form. `relays` must
    be true if two ranks have the same number.
    """
    program = program_for(
        operation,
        algorithm,
        len(hosts),
        rank,
        root=root,
        average=average,
        premultiply=premultiply,
        topology=topology,
    )
    group = _Group(operation, algorithm, hosts, root, topology or one_host(len(hosts)), relays)
    of_steps = group.of_steps(relayed(program) if relays else program)
    sums = group.sums
    most = max(1, int(sums.sending.max()), int(sums.receiving.max()))
    return Levels(of_steps, group.count, most, int(sums.lending.max()))


@dataclass(slots=True)
class _Sums:
    """The records that each rank sends and receives by exchanges, and seals for its own host."""

    world: int
    sending: Ranks = field(init=False)
    receiving: Ranks = field(init=False)
    lending: Ranks = field(init=False)

    def __post_init__(self) -> None:
        self.sending, self.receiving, self.lending = (
            np.zeros(self.world, dtype=np.int64) for _ in range(3)
        )

    def add(self, senders: Ranks, receivers: Ranks, crossing: Ranks) -> None:
        for counts, ranks in (
            (self.sending, senders[crossing == 1]),
            (self.receiving, receivers[crossing == 1]),
            (self.lending, senders[crossing == 0]),
        ):
            counts += np.bincount(ranks, minlength=self.world)


class _Group:
    """The parts of the computation that are the same for all ranks."""

    def __init__(
        self,
        operation: Operation,
        algorithm: Algorithm,
        hosts: tuple[int, ...],
        root: int,
        topology: Topology,
        relays: bool,
    ) -> None:
        self._hosts, self._relays = hosts, relays
        self._paths: Paths = paths_of(algorithm, hosts, topology)
        self._direct = algorithm is Algorithm.DIRECT
        one = operation in ROOTED or algorithm is Algorithm.TREE
        self._home = root if one else None
        """The home of the only chunk; None if every rank is the home of one."""
        self._homes = [root] if one else range(len(hosts))
        at_once = self._direct and operation in (Operation.ALL_REDUCE, Operation.BARRIER)
        self._ups = operation not in _DOWN_ALONE and not at_once
        self._downs = operation in _DOWN
        self._published = operation is not Operation.SCATTER

    def of_steps(self, program: Program) -> tuple[int, ...]:
        return tuple(self._level(program, step) for step in program.steps)

    def _level(self, program: Program, step: Step) -> int:
        own = self._hosts[program.rank]
        if self._direct or all(self._hosts[peer] == own for peer in step.peers):
            return 0
        sender = step.peers[0] if step.action in RECEIVING else program.rank
        down = step.action in (Action.PUBLISH, Action.FORWARD) or step.origin >= 0
        message = step.message
        if self._relays and message >= program.world:
            down, message = True, relayed_message(message, program.world)
        home = message if self._home is None else self._home
        if down:
            return self._before_down(home) + int(self._paths.exchanges_down(home)[sender])
        return int(self._paths.levels_up(home)[sender])

    def _before_down(self, home: int) -> int:
        """The number of exchanges that are complete when the home has everything that goes up."""
        return int(self._paths.exchanges_up(home)[home]) if self._ups else 0

    @cached_property
    def count(self) -> int:
        if self._direct:
            return 1
        most = 0
        for home in self._homes:
            above = self._before_down(home)
            below = int(self._paths.exchanges_down(home).max()) if self._downs else 0
            most = max(most, above + below)
        return max(1, most)

    @cached_property
    def sums(self) -> _Sums:
        sums = _Sums(len(self._hosts))
        everybody = np.arange(len(self._hosts), dtype=np.int64)
        for home in self._homes:
            others = np.delete(everybody, home)
            if self._ups:
                peers = self._paths.up(home)
                sums.add(others, peers[others], self._paths.crossing(peers)[others])
            if self._downs:
                peers = self._paths.down(home)
                crossing = self._paths.crossing(peers)[others]
                if self._relays or not self._published:
                    sums.add(peers[others], others, crossing)
                else:  # all numbers differ, and one record serves all its receivers
                    sums.receiving[others] += 1
                    sums.sending[np.unique(peers[others])] += 1
        return sums
