"""Messages between ranks as traffic: who takes part, their memory, and the right result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sealring.core.engine.collective import DType
from sealring.core.schedule import Algorithm, Operation, Topology
from tests.core.engine.cases import Array, Case, Tensors, expected, tensors_of, values

ANY_SOURCE_TAG: Final = 1000
"""Tags from here on belong to one message each, so only one sender can be meant."""
GREETING_TAG: Final = 1 << 30


@dataclass(frozen=True)
class Message:
    """A message; its ranks are numbered within the group."""

    sender: int
    receiver: int
    tag: int
    elements: int
    dtype: DType = DType.FLOAT32

    @property
    def from_anyone(self) -> bool:
        return self.tag >= ANY_SOURCE_TAG

    def __str__(self) -> str:
        size = f"{self.elements}x{self.dtype.name.lower()}"
        taken = ", taken from anyone" if self.from_anyone else ""
        return f"message {self.sender} to {self.receiver} of {size}, tag {self.tag}{taken}"


@dataclass(frozen=True)
class Greeting:
    """Every rank sends every other rank an empty message, so each mailbox link is used."""

    turn: int

    @property
    def tag(self) -> int:
        return GREETING_TAG + self.turn

    def __str__(self) -> str:
        return f"greeting {self.turn}"


What = Case | Message | Greeting


class Parcel:
    """One rank's array for a message: the bytes to send, or the room for the received bytes."""

    def __init__(self, message: Message, rank: int, seed: int) -> None:
        like = Case(Operation.BROADCAST, Algorithm.DIRECT, message.elements, message.dtype)
        self.slots: list[Array] = [values(like, message.elements, rank, seed)]

    def bits(self) -> list[bytes]:
        return [array.tobytes() for array in self.slots]


class Nothing:
    """The memory of a greeting, which moves no bytes."""

    slots: Final[list[Array]] = []

    def bits(self) -> list[bytes]:
        return []


def takes_part(what: What, rank: int) -> bool:
    return not isinstance(what, Message) or rank in (what.sender, what.receiver)


def memory_of(what: What, world: int, rank: int, seed: int) -> Tensors | Parcel | Nothing:
    if isinstance(what, Message):
        return Parcel(what, rank, seed)
    if isinstance(what, Greeting):
        return Nothing()
    return Tensors(what, world, rank, seed)


def bits_before(what: What, world: int, seed: int) -> dict[int, list[bytes]]:
    """Returns the bytes before the call, by rank, for all ranks that take part."""
    if isinstance(what, Case):
        return {rank: each.bits() for rank, each in enumerate(tensors_of(what, world, seed))}
    ranks = (rank for rank in range(world) if takes_part(what, rank))
    return {rank: memory_of(what, world, rank, seed).bits() for rank in ranks}


def bits_after(
    what: What, world: int, seed: int, record_bytes: int, topology: Topology
) -> dict[int, list[bytes]]:
    if isinstance(what, Case):
        return dict(enumerate(expected(what, world, seed, record_bytes, topology)))
    before = bits_before(what, world, seed)
    if isinstance(what, Message):
        before[what.receiver] = before[what.sender]
    return before
