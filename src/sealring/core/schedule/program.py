"""A collective as a small program of steps: pure data, no torch, no I/O.

A program is written for one rank of one world and says nothing about sizes. The engine cuts each
slot (a range of memory: a chunk of a tensor, one tensor of a list, or scratch) into segments of one
record each. It runs the program once per segment, several segments at a time. A step exists in
segment 0, and in every other segment in which its slot has bytes. So the two ends of a message, who
agree on its length, also agree on its records, whatever other slots they have.

A step may run when the steps in its ``after`` that exist are done in the same segment. Three more
rules avoid a circle of records that wait behind each other: a step runs in the order of segments,
steps that need no other rank run in the order in which they became ready, and so do the sends on
one link.

``message`` connects the programs of two ranks: a SEND or PUBLISH and the RECEIVE that takes its
record have the same number. A (sealer, message) pair occurs once per program, so it identifies a
record.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache

from sealring._native import Action as Action
from sealring.errors import Unsupported


class Operation(IntEnum):
    """The collective that a program performs; every record names it."""

    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    BARRIER = 5
    REDUCE = 6
    GATHER = 7
    SCATTER = 8
    ALL_TO_ALL = 9
    INTRODUCTION = 10
    """The group's own all_reduce, by which ranks agree on the least of their numbers."""
    OBJECTION = 11
    """The group's own broadcast, by which a rank says why it does not agree. From any rank it needs
    only an introduction's links, so that a rank that cannot make another link can still say so."""


OF_THE_GROUP = frozenset({Operation.INTRODUCTION, Operation.OBJECTION})
CALLED = tuple(each for each in Operation if each not in OF_THE_GROUP)
"""The operations that a script can call."""
ROOTED = frozenset(
    {
        Operation.BROADCAST,
        Operation.REDUCE,
        Operation.GATHER,
        Operation.SCATTER,
        Operation.OBJECTION,
    }
)
"""The operations that have a root; ranks compare their roots."""
REDUCING = frozenset(
    {Operation.ALL_REDUCE, Operation.REDUCE_SCATTER, Operation.REDUCE, Operation.INTRODUCTION}
)


class Algorithm(IntEnum):
    """How a program performs its collective; every record names it."""

    RING = 1
    DIRECT = 2
    TREE = 3
    PARAMETER_SERVER = 4
    HIERARCHICAL = 5


@dataclass(frozen=True, slots=True)
class Step:
    action: Action
    slot: int
    peers: tuple[int, ...] = ()
    message: int = 0
    origin: int = -1
    """The rank that sealed the record to receive, if it was PUBLISHed; -1 for a record of the
    pair."""
    source: int = -1
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    operation: Operation
    algorithm: Algorithm
    rank: int
    world: int
    slots: int
    """The number of slots that the caller provides; scratch slots are numbered after them."""
    scratch: tuple[int, ...]
    """For each scratch slot, the provided slot whose length it has."""
    steps: tuple[Step, ...]

    def dependents(self) -> list[list[int]]:
        """For each step, the later steps that wait for it."""
        dependents: list[list[int]] = [[] for _ in self.steps]
        for index, step in enumerate(self.steps):
            for earlier in step.after:
                dependents[earlier].append(index)
        return dependents

    def sealed_bytes(self, slot_bytes: Sequence[int]) -> int:
        """The bytes that this rank seals if the provided slots have these lengths."""
        lengths = [*slot_bytes, *(slot_bytes[like] for like in self.scratch)]
        return sum(lengths[step.slot] for step in self.steps if step.action in _SEALING)

    def opened_bytes(self, slot_bytes: Sequence[int]) -> int:
        """The bytes that this rank opens if the provided slots have these lengths."""
        lengths = [*slot_bytes, *(slot_bytes[like] for like in self.scratch)]
        return sum(lengths[step.slot] for step in self.steps if step.action in _OPENING)


_SEALING = frozenset({Action.SEND, Action.PUBLISH})
_OPENING = frozenset({Action.RECEIVE, Action.RECEIVE_REDUCE})


@dataclass
class ProgramWriter:
    """Collects steps in order, and computes which earlier steps each must wait for.

    A step waits for the last writer of each slot that it reads. It also waits for the last writer,
    and all readers since, of the slot that it writes. So the author of a program writes sequential
    code, and the engine may overlap all independent steps.
    """

    operation: Operation
    algorithm: Algorithm
    rank: int
    world: int
    slots: int
    _scratch: list[int] = field(default_factory=list)
    _steps: list[Step] = field(default_factory=list)
    _writer: dict[int, int] = field(default_factory=dict)
    _readers: dict[int, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise Unsupported(f"rank {self.rank} is not in a world of {self.world}")

    def scratch(self, like: int) -> int:
        """A new scratch slot, as long as the provided slot `like`."""
        self._scratch.append(like)
        return self.slots + len(self._scratch) - 1

    def send(self, slot: int, to: int, message: int) -> None:
        self._add(Step(Action.SEND, slot, (to,), message), reads=(slot,))

    def publish(self, slot: int, to: Iterable[int], message: int) -> None:
        if peers := tuple(to):
            self._add(Step(Action.PUBLISH, slot, peers, message), reads=(slot,))

    def forward(self, receive: int, to: Iterable[int]) -> None:
        if peers := tuple(to):
            received = self._steps[receive]
            step = Step(
                Action.FORWARD, received.slot, peers, received.message, received.origin, receive
            )
            self._add(step, after=(receive,))

    def receive(self, slot: int, source: int, message: int, origin: int = -1) -> int:
        return self._add(Step(Action.RECEIVE, slot, (source,), message, origin), writes=slot)

    def receive_reduce(self, slot: int, source: int, message: int, origin: int = -1) -> int:
        return self._add(
            Step(Action.RECEIVE_REDUCE, slot, (source,), message, origin),
            reads=(slot,),
            writes=slot,
        )

    def copy(self, slot: int, source: int) -> None:
        self._add(Step(Action.COPY, slot, source=source), reads=(source,), writes=slot)

    def reduce(self, slot: int, source: int) -> None:
        self._add(Step(Action.REDUCE, slot, source=source), reads=(slot, source), writes=slot)

    def average(self, slot: int) -> None:
        self._add(Step(Action.AVERAGE, slot), reads=(slot,), writes=slot)

    def premultiply(self, slot: int) -> None:
        self._add(Step(Action.PREMULTIPLY, slot), reads=(slot,), writes=slot)

    def program(self) -> Program:
        return Program(
            self.operation,
            self.algorithm,
            self.rank,
            self.world,
            self.slots,
            tuple(self._scratch),
            tuple(self._steps),
        )

    def _add(
        self,
        step: Step,
        *,
        reads: tuple[int, ...] = (),
        writes: int | None = None,
        after: tuple[int, ...] = (),
    ) -> int:
        index = len(self._steps)
        waits = set(after)
        waits.update(self._writer[slot] for slot in reads if slot in self._writer)
        if writes is not None:
            waits.update(self._readers.get(writes, ()))
            if writes in self._writer:
                waits.add(self._writer[writes])
            self._writer[writes] = index
            self._readers[writes] = set()
        for slot in reads:
            if slot != writes:
                self._readers.setdefault(slot, set()).add(index)
        self._steps.append(
            Step(
                step.action,
                step.slot,
                step.peers,
                step.message,
                step.origin,
                step.source,
                tuple(sorted(waits)),
            )
        )
        return index


@lru_cache(maxsize=256)
def relayed(program: Program) -> Program:
    """Converts a program so that every record is sealed for one peer: none is published or
    forwarded.

    This is needed if some ranks of a group read each other's GPU memory while others exchange
    records (native/device/wires.hpp). Then no memory can be read by all receivers of a record. So a
    rank that would forward a record opens it, and seals the content again for each receiver.
    """
    world, rank = program.world, program.rank
    writer = ProgramWriter(program.operation, program.algorithm, rank, world, program.slots)
    for like in program.scratch:
        writer.scratch(like)

    def message(of: int, receiver: int) -> int:
        """Authors number messages below the world."""
        return world * (1 + of) + receiver

    for step in program.steps:
        match step.action:
            case Action.SEND:
                writer.send(step.slot, step.peers[0], step.message)
            case Action.PUBLISH | Action.FORWARD:
                for peer in step.peers:
                    writer.send(step.slot, peer, message(step.message, peer))
            case Action.RECEIVE | Action.RECEIVE_REDUCE:
                number = step.message if step.origin < 0 else message(step.message, rank)
                receive = writer.receive if step.action is Action.RECEIVE else writer.receive_reduce
                receive(step.slot, step.peers[0], number)
            case Action.COPY:
                writer.copy(step.slot, step.source)
            case Action.REDUCE:
                writer.reduce(step.slot, step.source)
            case Action.AVERAGE:
                writer.average(step.slot)
            case Action.PREMULTIPLY:
                writer.premultiply(step.slot)
    return writer.program()


def relayed_message(message: int, world: int) -> int:
    """The number that a published or forwarded message had in the program before `relayed`."""
    return message // world - 1
