"""Makes a world, its traffic and its faults from a seed. Nothing here runs anything.

The same seed and name make the same plan on every machine. Only races of real threads and processes
differ: which rank is where when a fault strikes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Final, Literal

from sealring.core.engine.collective import COMPLEXES, DType, ReduceKind, supported_kinds
from sealring.core.engine.engine import topology_of
from sealring.core.schedule import (
    CALLED,
    REDUCING,
    ROOTED,
    Algorithm,
    Operation,
    Selection,
    Topology,
    program_for,
)
from sealring.core.schedule.choose import everywhere
from sealring.core.schedule.execution import SENDING
from tests.chaos.messages import ANY_SOURCE_TAG, Greeting, Message, What, takes_part
from tests.core.engine.cases import PROGRAMS, Case

Where = Literal["local", "light", "processes"]
Channel = Literal["collectives", "messages"]
"""Collectives and messages have separate links and keys."""

PATIENT_S: Final = 60.0
"""The timeout if no planned fault makes a rank wait until it."""
QUICK_S: Final[dict[Where, float]] = {"local": 3.0, "light": 10.0, "processes": 5.0}
"""The timeout if a planned fault does."""


class FaultKind(StrEnum):
    # one direction of a link
    FLIP = "flip"
    DROP = "drop"
    REPLAY = "replay"
    REORDER = "reorder"
    TRUNCATE = "truncate"
    CUT = "cut"
    SILENCE = "silence"
    DELAY = "delay"
    CHOP = "chop"
    MUTE = "mute"
    # a link that is being made
    INTERRUPT = "interrupt"
    HOLD = "hold"
    # the memory that two ranks share
    SCRIBBLE = "scribble"
    # all ranks of a machine
    NEIGHBOUR = "neighbour"
    # a rank
    KILL = "kill"
    STOP = "stop"
    PAUSE = "pause"
    LEAVE = "leave"
    DISAGREE = "disagree"


ON_A_STREAM: Final = {
    FaultKind.FLIP: 4, FaultKind.DROP: 2, FaultKind.REPLAY: 4, FaultKind.REORDER: 3,
    FaultKind.TRUNCATE: 2, FaultKind.CUT: 3, FaultKind.SILENCE: 1, FaultKind.DELAY: 3,
    FaultKind.CHOP: 2, FaultKind.MUTE: 2,
}  # fmt: skip
ON_A_BELL: Final = {FaultKind.CUT: 3, FaultKind.DELAY: 3}
"""With shared memory the socket carries only wake-ups."""
ON_SETUP: Final = {FaultKind.INTERRUPT: 10, FaultKind.HOLD: 6}
"""Faults of links that are made during traffic."""
ON_MEMORY: Final = {FaultKind.SCRIBBLE: 4}
ON_A_HOST: Final = {FaultKind.NEIGHBOUR: 12}
"""Another process of the workers' user tries to write into all that they have."""
ON_A_RANK: Final[dict[Where, dict[FaultKind, int]]] = {
    "local": {
        FaultKind.STOP: 1, FaultKind.PAUSE: 2, FaultKind.LEAVE: 2, FaultKind.DISAGREE: 2
    },
    "light": {
        FaultKind.STOP: 1, FaultKind.PAUSE: 2, FaultKind.LEAVE: 4, FaultKind.DISAGREE: 2
    },
    "processes": {
        FaultKind.KILL: 5, FaultKind.STOP: 2, FaultKind.PAUSE: 4, FaultKind.LEAVE: 2,
        FaultKind.DISAGREE: 2,
    },
}  # fmt: skip
RANK_KINDS: Final = frozenset(ON_A_RANK["local"]) | frozenset(ON_A_RANK["processes"])
MAKES_SILENCE: Final = frozenset(
    {
        FaultKind.DROP,
        FaultKind.REORDER,
        FaultKind.TRUNCATE,
        FaultKind.SILENCE,
        FaultKind.SCRIBBLE,
        FaultKind.STOP,
    }
)
"""After one of these a rank may wait until the timeout (see also may_make_silence)."""


@dataclass(frozen=True, slots=True)
class Call:
    """One collective, the same on all members of its group, or one message between two members."""

    group: int
    number: int
    """Its number in the group, from 1; messages have their own count."""
    case: What
    seed: int
    """The seed of the values."""
    background: bool = False
    """Called with async_op and waited for at the end of its batch, as messages always are."""

    @property
    def channel(self) -> Channel:
        return "collectives" if isinstance(self.case, Case) else "messages"

    def __str__(self) -> str:
        counted = "collective" if isinstance(self.case, Case) else "message"
        return f"group {self.group}, {counted} {self.number}: {self.case}"


@dataclass(frozen=True, slots=True)
class Fault:
    kind: FaultKind
    group: int = 0
    sender: int = -1
    receiver: int = -1
    """Ranks of the world: a link's direction, or two ranks that share memory."""
    rank: int = -1
    """The rank that the fault strikes, if it strikes a rank."""
    at: int = 1
    """A link fault strikes from this collective on; a rank fault strikes before this call."""
    skip: int = 0
    """How many records pass first."""
    place: float = 0.5
    """The place in the record, from 0 to 1."""
    amount: float = 0.0
    """Seconds, bytes, bits or records, as the kind of fault defines."""
    channel: Channel = "collectives"
    """Which of a pair's two links it strikes."""

    def __str__(self) -> str:
        if self.kind in ON_A_HOST:
            return f"{self.kind} (all ranks)"
        if self.rank >= 0:
            return f"{self.kind} (rank {self.rank}, before call {self.at})"
        since = f", from collective {self.at} on" if self.channel == "collectives" else ""
        return (
            f"{self.kind} ({self.sender} to {self.receiver}, {self.channel} of group {self.group}"
            f"{since})"
        )


@dataclass(frozen=True, slots=True)
class Plan:
    where: Where
    seed: int
    number: int
    world: int
    transport: Literal["tcp", "shm"]
    record_bytes: int
    rekey_bytes: int
    algorithm: Algorithm | None
    """The setting "algorithm", for processes."""
    hosts: tuple[int, ...]
    """The number of the host that each rank claims to be on."""
    groups: tuple[tuple[int, ...], ...]
    """The members of each group; the first group is the whole world."""
    batches: tuple[tuple[Call, ...], ...]
    faults: tuple[Fault, ...]
    timeout_s: float

    @property
    def name(self) -> str:
        return f"{self.where}/{self.number}"

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(call for batch in self.batches for call in batch)

    @property
    def channels(self) -> frozenset[Channel]:
        """What the plan's ranks communicate over; a local world has only one of the two."""
        return frozenset(call.channel for call in self.calls)

    def makes_silence(self, fault: Fault) -> bool:
        return may_make_silence(fault, self.batches)

    def topology(self, group: int) -> Topology:
        return _topology(self.hosts, self.groups[group])

    def takes_part(self, call: Call, rank: int) -> bool:
        members = self.groups[call.group]
        return rank in members and takes_part(call.case, members.index(rank))

    def at(self, call: Call) -> int:
        """Returns the call's number in the plan, from 1."""
        return self.calls.index(call) + 1

    def probes(self, group: int, turn: int) -> list[Call]:
        """Returns the calls after all faults, by which every rank must know a failure."""
        counted = [c.number for c in self.calls if c.group == group and c.channel == "collectives"]
        probes = []
        if "messages" in self.channels:
            probes.append(Call(group, turn, Greeting(turn), 0))
        if "collectives" in self.channels:
            probes.append(Call(group, max(counted, default=0) + turn, PROBE, 0))
        return probes


_WORLDS: Final[dict[Where, list[int]]] = {
    "local": [2, 3, 3, 4, 5],
    "light": [9, 10, 11, 12],
    "processes": [2, 2, 3, 3, 4],
}
"""How many ranks; light worlds are so large that traffic makes most links."""
PROBE: Final = Case(Operation.BARRIER, Algorithm.DIRECT, 0, DType.UINT8)
PROBES: Final = 2
"""In the first probe the last witness sees a fault; in the second one all ranks hear of it."""


def make_plan(where: Where, seed: int, number: int) -> Plan:
    chance = Random(f"sealring chaos {seed} {where} {number}")
    world = chance.choice(_WORLDS[where])
    transport = chance.choice(["tcp"] if where == "light" else ["tcp", "tcp", "tcp", "shm"])
    record_bytes = chance.choice([1 << 10, 4 << 10, 16 << 10, 64 << 10, 124 << 10])
    algorithm = chance.choice([None, None, *Algorithm])
    hosts = tuple(chance.randrange(chance.choice([1, 2, world])) for _ in range(world))
    groups = [tuple(range(world))]
    if where == "processes" and world > 2:
        for _ in range(chance.choice([0, 1, 2])):
            groups.append(tuple(sorted(chance.sample(range(world), chance.randint(2, world)))))
    # Only a group connects engines with mailboxes, so a local world has one of them.
    messages = chance.choice([0.0, 0.3, 0.7] if where == "processes" else [0.0, 0.0, 1.0])
    traffic = _Traffic(chance, where, tuple(groups), hosts, record_bytes, algorithm, messages)
    batches = traffic.batches()
    faults = _faults(chance, where, groups, hosts, transport, batches)
    quick = any(may_make_silence(fault, batches) for fault in faults)
    return Plan(
        where,
        seed,
        number,
        world,
        transport,  # type: ignore[arg-type]
        record_bytes,
        rekey_bytes=chance.choice([1, 3000, 100_000, 64 << 30]),
        algorithm=algorithm,
        hosts=hosts,
        groups=tuple(groups),
        batches=batches,
        faults=faults,
        timeout_s=QUICK_S[where] if quick else PATIENT_S,
    )


def may_make_silence(fault: Fault, batches: tuple[tuple[Call, ...], ...]) -> bool:
    """Tells whether a rank may wait until the timeout for what the fault took away."""
    if fault.kind is FaultKind.LEAVE:
        # Messages are in order, so a message from anyone may still come from another rank.
        cases = [call.case for batch in batches for call in batch]
        return any(isinstance(case, Message) and case.from_anyone for case in cases)
    return fault.kind in MAKES_SILENCE


def _topology(hosts: tuple[int, ...], members: tuple[int, ...]) -> Topology:
    return topology_of([str(hosts[rank]) for rank in members])


@dataclass(frozen=True, slots=True)
class _Traffic:
    chance: Random
    where: Where
    groups: tuple[tuple[int, ...], ...]
    hosts: tuple[int, ...]
    record_bytes: int
    algorithm: Algorithm | None
    messages: float
    """The share of messages in the traffic."""

    def batches(self) -> tuple[tuple[Call, ...], ...]:
        chance = self.chance
        collectives, messages = [0] * len(self.groups), [0] * len(self.groups)
        batches = []
        for _ in range(chance.randint(3, 10)):
            batch = []
            for _ in range(chance.choice([1, 1, 2, 4])):
                group = chance.randrange(len(self.groups))
                case: What
                if chance.random() < self.messages:
                    messages[group] += 1
                    number, background = messages[group], True
                    case = self._message(group, number)
                else:
                    collectives[group] += 1
                    number = collectives[group]
                    background = self.where == "processes" and chance.random() < 0.5
                    case = self._case(group)
                batch.append(Call(group, number, case, chance.randrange(1 << 20), background))
            batches.append(tuple(batch))
        return tuple(batches)

    def _elements(self, dtype: DType) -> int:
        # Most calls are small; a large one takes several records of any size.
        largest = min(self.chance.choice([64, 2_000, 2_000, 24 * self.record_bytes]), 400_000)
        return self.chance.randint(0, largest // dtype.itemsize)

    def _message(self, group: int, number: int) -> Message:
        sender, receiver = self.chance.sample(range(len(self.groups[group])), 2)
        # A few tags repeat, so that their order counts; others are unique and received from anyone.
        tag = self.chance.choice([0, 0, 1, 7, ANY_SOURCE_TAG + number])
        dtype = self.chance.choice(list(DType))
        return Message(sender, receiver, tag, self._elements(dtype), dtype)

    def _case(self, group: int) -> Case:
        chance, world = self.chance, len(self.groups[group])
        operation = chance.choice(CALLED)
        dtype = chance.choice([*DType, DType.FLOAT32, DType.BFLOAT16])
        kind = ReduceKind.NONE
        if operation in REDUCING:
            dtype = DType.FLOAT32 if dtype is DType.BYTES else dtype
            kinds = supported_kinds(dtype)
            if self.where == "processes" and dtype in COMPLEXES:
                kinds -= {ReduceKind.PRODUCT}  # torch itself refuses it
            kind = chance.choice(sorted(kinds))
        elements = self._elements(dtype)
        algorithm = chance.choice([each for op, each in PROGRAMS if op is operation])
        if operation is Operation.BARRIER:
            elements, dtype = 0, DType.UINT8
        if self.where == "processes":
            fixed = {} if self.algorithm is None else everywhere(self.algorithm)
            selection = Selection(_topology(self.hosts, self.groups[group]), fixed=fixed)
            algorithm = selection(operation, elements * dtype.itemsize)
        root = chance.randrange(world) if operation in ROOTED else 0
        by_torch = self.where == "processes" and operation is Operation.ALL_REDUCE
        as_reals = by_torch and dtype in COMPLEXES
        return Case(operation, algorithm, elements, dtype, kind, root, as_reals=as_reals)


def _faults(
    chance: Random,
    where: Where,
    groups: list[tuple[int, ...]],
    hosts: tuple[int, ...],
    transport: str,
    batches: tuple[tuple[Call, ...], ...],
) -> tuple[Fault, ...]:
    calls = [call for batch in batches for call in batch]
    kinds = dict(ON_A_STREAM if transport == "tcp" else ON_A_BELL)
    if transport == "shm" and where == "local":
        kinds |= ON_MEMORY
    if where == "processes":
        kinds |= ON_A_HOST
    if where == "light":
        kinds |= ON_SETUP
    kinds |= ON_A_RANK[where]
    faults: dict[object, Fault] = {}
    for _ in range(chance.choice([0, 1, 1, 1, 1, 2, 2, 3])):
        kind = chance.choices(list(kinds), list(kinds.values()))[0]
        aim = chance.choice(calls)
        place, skip = chance.random(), chance.choice([0, 0, 0, 1, 2, 7])
        amount = chance.random()
        if kind in ON_A_HOST:
            faults.setdefault(kind, Fault(kind))
        elif kind in RANK_KINDS:
            rank = chance.randrange(len(groups[0]))
            at = chance.randint(1, len(calls))
            fault = Fault(kind, 0, rank=rank, at=at, place=place, amount=amount)
            faults.setdefault(rank, fault)  # at most one fault for each rank
        else:
            members = groups[aim.group]
            # Mostly aim at links that carry the call's records, whatever its algorithm.
            used = sorted(links_used(aim.case, _topology(hosts, members)))
            anywhere = [(a, b) for a in range(len(members)) for b in range(len(members)) if a != b]
            ways = used if used and chance.random() < 0.8 else anywhere
            sender, receiver = (members[rank] for rank in chance.choice(ways))
            fault = Fault(
                kind,
                aim.group,
                sender,
                receiver,
                at=aim.number if aim.channel == "collectives" else 1,
                skip=skip,
                place=place,
                amount=amount,
                channel=aim.channel,
            )
            faults.setdefault((aim.group, aim.channel, sender, receiver), fault)
    return tuple(faults.values())


def links_used(what: What, topology: Topology) -> set[tuple[int, int]]:
    """Returns (sender, receiver) of each link that carries the call's records, by group ranks."""
    world = len(topology.host_of)
    if isinstance(what, Message):
        # The receiver confirms that it has taken the message.
        return {(what.sender, what.receiver), (what.receiver, what.sender)}
    if isinstance(what, Greeting):
        return {(a, b) for a in range(world) for b in range(world) if a != b}
    programs = [
        program_for(what.operation, what.algorithm, world, rank, root=what.root, topology=topology)
        for rank in range(world)
    ]
    return {
        (program.rank, peer)
        for program in programs
        for step in program.steps
        if step.action in SENDING
        for peer in step.peers
    }
