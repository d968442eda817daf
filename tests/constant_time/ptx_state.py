"""What PTX code computes on: memory and registers whose every part is known to be secret or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tests.constant_time.ptx import Thread

M32: Final = 0xFFFFFFFF
M64: Final = (1 << 64) - 1
# Generic addresses: each space has a window of its own, and global memory is the rest.
SHARED, LOCAL, PARAM = 1 << 48, 1 << 49, 1 << 50
PART: Final = 1 << 24  # between the shared memories of a cluster, as `mapa` maps them
LOCAL_BYTES: Final = 4096
WIDTH: Final = {"8": 1, "16": 2, "32": 4, "64": 8}


@dataclass(frozen=True)
class Leak:
    what: str
    function: str
    instruction: str


class Memory:
    def __init__(self, size: int) -> None:
        self.bytes = bytearray(size)
        self.secret = bytearray(size)

    def load(self, at: int, count: int) -> tuple[int, int]:
        if not 0 <= at <= len(self.bytes) - count:
            raise IndexError(f"a load at {at:#x} is outside of memory")
        return int.from_bytes(self.bytes[at : at + count], "little"), any(
            self.secret[at : at + count]
        )

    def store(self, at: int, count: int, value: int, secret: int) -> None:
        if not 0 <= at <= len(self.bytes) - count:
            raise IndexError(f"a store at {at:#x} is outside of memory")
        self.bytes[at : at + count] = (value & ((1 << 8 * count) - 1)).to_bytes(count, "little")
        self.secret[at : at + count] = bytes([1 if secret else 0]) * count


@dataclass
class Function:
    name: str
    parameters: list[str]
    results: list[str]
    statements: list[str] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)
    constants: list[int] = field(default_factory=list)
    local_bytes: int = 0
    code: list[Callable[[Frame], Any]] = field(default_factory=list)

    def slot(self, operand: str) -> int:
        """Where an operand lies in a frame. Immediate numbers are registers that never change."""
        if operand not in self.slots:
            self.slots[operand] = len(self.constants)
            try:
                self.constants.append(int(operand, 0) & M64)
            except ValueError:
                self.constants.append(0)
        return self.slots[operand]


@dataclass
class Frame:
    thread: Thread
    function: Function
    values: list[int]
    secrets: list[int]
    parameters: dict[str, Memory]
    pc: int = 0
