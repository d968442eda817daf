"""A seed -> a world, its traffic and its faults. Nothing here runs anything.

The same seed and name make the same plan on every machine. What the plan leaves open are the races
of real threads and processes: which rank is where when a fault strikes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Final, Literal

from sealring.engine.datatypes import COMPLEXES, DType, ReduceKind, supported_kinds
from sealring.schedule import REDUCING, Algorithm, Operation, choose
from tests.chaos.operations import OPERATIONS
from tests.engine.cases import PROGRAMS, Case

Where = Literal["local", "processes"]

PATIENT_S: Final = 60.0
"""The timeout where nothing planned makes a rank wait for it."""
QUICK_S: Final[dict[Where, float]] = {"local": 3.0, "processes": 5.0}
"""... and where something does."""


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
    # the memory that two ranks share
    SCRIBBLE = "scribble"
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
"""Over shared memory the socket carries nothing but wake-ups."""
ON_MEMORY: Final = {FaultKind.SCRIBBLE: 4}
ON_A_RANK: Final[dict[Where, dict[FaultKind, int]]] = {
    "local": {
        FaultKind.STOP: 1, FaultKind.PAUSE: 2, FaultKind.LEAVE: 2, FaultKind.DISAGREE: 2
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
"""After these somebody may wait for what never comes, until the timeout."""


@dataclass(frozen=True, slots=True)
class Call:
    """One collective, the same on every member of its group."""

    group: int
    number: int
    """As the group counts, from 1."""
    case: Case
    seed: int
    """Of the values."""
    background: bool = False
    """Called with async_op, and waited for at the end of its batch."""


@dataclass(frozen=True, slots=True)
class Fault:
    kind: FaultKind
    group: int = 0
    sender: int = -1
    receiver: int = -1
    """Ranks of the world: the direction of a link, or two who share memory."""
    rank: int = -1
    """... or the rank that it befalls."""
    at: int = 1
    """Strikes from this collective of the group on; on a rank, before the so-manieth call."""
    skip: int = 0
    """So many records pass first."""
    place: float = 0.5
    """Where in the record, from 0 to 1."""
    amount: float = 0.0
    """Seconds, bytes, bits or records: the kind knows."""

    def __str__(self) -> str:
        whom = f"rank {self.rank}" if self.rank >= 0 else f"{self.sender} to {self.receiver}"
        return f"{self.kind} ({whom}, group {self.group}, from collective {self.at})"


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
    """What SEALRING_ALGORITHM says, for processes."""
    groups: tuple[tuple[int, ...], ...]
    """The members of each; the first is the whole world."""
    batches: tuple[tuple[Call, ...], ...]
    faults: tuple[Fault, ...]
    timeout_s: float

    @property
    def name(self) -> str:
        return f"{self.where}/{self.number}"

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(call for batch in self.batches for call in batch)

    def last(self, group: int) -> int:
        """The number of the group's last collective before the probes."""
        return max((call.number for call in self.calls if call.group == group), default=0)

    def probe(self, group: int, turn: int) -> Call:
        """After the traffic, when no fault strikes any more: by then everybody must know."""
        return Call(group, self.last(group) + turn, PROBE, 0)


PROBE: Final = Case(Operation.BARRIER, Algorithm.DIRECT, 0, DType.UINT8)
PROBES: Final = 2
"""In the first one the last who can see a fault sees it; in the second one all hear of it."""


def make_plan(where: Where, seed: int, number: int) -> Plan:
    chance = Random(f"sealring chaos {seed} {where} {number}")
    world = chance.choice([2, 2, 3, 3, 4] if where == "processes" else [2, 3, 3, 4, 5])
    transport = chance.choice(["tcp", "tcp", "tcp", "shm"])
    record_bytes = chance.choice([1 << 10, 4 << 10, 16 << 10, 64 << 10, 124 << 10])
    # A cut link that a tree or a hierarchy does not use ends nobody; the rules do not know that.
    algorithm = chance.choice([None, None, Algorithm.RING, Algorithm.DIRECT])
    groups = [tuple(range(world))]
    if where == "processes" and world > 2:
        for _ in range(chance.choice([0, 1, 2])):
            groups.append(tuple(sorted(chance.sample(range(world), chance.randint(2, world)))))
    batches = _traffic(chance, where, groups, record_bytes, algorithm)
    faults = _faults(chance, where, groups, transport, batches)
    quick = any(fault.kind in MAKES_SILENCE for fault in faults)
    return Plan(
        where,
        seed,
        number,
        world,
        transport,  # type: ignore[arg-type]
        record_bytes,
        rekey_bytes=chance.choice([1, 3000, 100_000, 64 << 30]),
        algorithm=algorithm,
        groups=tuple(groups),
        batches=batches,
        faults=faults,
        timeout_s=QUICK_S[where] if quick else PATIENT_S,
    )


def _traffic(
    chance: Random,
    where: Where,
    groups: list[tuple[int, ...]],
    record_bytes: int,
    algorithm: Algorithm | None,
) -> tuple[tuple[Call, ...], ...]:
    numbers = [0] * len(groups)
    batches = []
    for _ in range(chance.randint(3, 10)):
        batch = []
        for _ in range(chance.choice([1, 1, 2, 4])):
            group = chance.randrange(len(groups))
            numbers[group] += 1
            case = _case(chance, where, len(groups[group]), record_bytes, algorithm)
            background = where == "processes" and chance.random() < 0.5
            batch.append(Call(group, numbers[group], case, chance.randrange(1 << 20), background))
        batches.append(tuple(batch))
    return tuple(batches)


def _case(
    chance: Random, where: Where, world: int, record_bytes: int, override: Algorithm | None
) -> Case:
    operation = chance.choice(list(OPERATIONS))
    dtype = chance.choice([*DType, DType.FLOAT32, DType.BFLOAT16])
    kind = ReduceKind.NONE
    if operation in REDUCING:
        dtype = DType.FLOAT32 if dtype is DType.BYTES else dtype
        kinds = supported_kinds(dtype)
        if where == "processes" and dtype in COMPLEXES:
            kinds -= {ReduceKind.PRODUCT}  # torch itself refuses it
        kind = chance.choice(sorted(kinds))
    # Small ones are most of the traffic; large ones take several records of whatever size.
    largest = min(chance.choice([64, 2_000, 2_000, 24 * record_bytes]), 400_000)
    elements = chance.randint(0, largest // dtype.itemsize)
    algorithm = chance.choice([each for op, each in PROGRAMS if op is operation])
    if operation is Operation.BARRIER:
        elements, dtype = 0, DType.UINT8
    if where == "processes":
        algorithm = choose(operation, world, elements * dtype.itemsize, override)
    root = chance.randrange(world) if OPERATIONS[operation].rooted else 0
    return Case(operation, algorithm, elements, dtype, kind, root)


def _faults(
    chance: Random,
    where: Where,
    groups: list[tuple[int, ...]],
    transport: str,
    batches: tuple[tuple[Call, ...], ...],
) -> tuple[Fault, ...]:
    calls = [call for batch in batches for call in batch]
    kinds = dict(ON_A_STREAM if transport == "tcp" else ON_A_BELL)
    if transport == "shm" and where == "local":
        kinds |= ON_MEMORY
    kinds |= ON_A_RANK[where]
    faults: dict[object, Fault] = {}
    for _ in range(chance.choice([0, 1, 1, 1, 1, 2, 2, 3])):
        kind = chance.choices(list(kinds), list(kinds.values()))[0]
        aim = chance.choice(calls)
        place, skip = chance.random(), chance.choice([0, 0, 0, 1, 2, 7])
        amount = chance.random()
        if kind in RANK_KINDS:
            rank = chance.randrange(len(groups[0]))
            at = chance.randint(1, len(calls))
            fault = Fault(kind, 0, rank=rank, at=at, place=place, amount=amount)
            faults.setdefault(rank, fault)  # one misfortune each
        else:
            members = groups[aim.group]
            sender = chance.randrange(len(members))
            # Rings go up by one; mostly the fault sits where their records pass.
            step = 1 if chance.random() < 0.7 else chance.randint(1, len(members) - 1)
            way = (members[sender], members[(sender + step) % len(members)])
            fault = Fault(
                kind, aim.group, *way, at=aim.number, skip=skip, place=place, amount=amount
            )
            faults.setdefault((aim.group, way), fault)
    return tuple(faults.values())
