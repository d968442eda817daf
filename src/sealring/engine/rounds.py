"""Short letters that all ranks of a group exchange by a collective of the group itself.

So what they tell is sealed, and comes from the member that it says it comes from. It decides only
which way records take; they are sealed on all ways.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Generator, Sequence
from typing import Final

from sealring.engine.collective import Collective
from sealring.engine.datatypes import DType
from sealring.schedule import Algorithm, Operation

_REASON_BYTES: Final = 1023
_VERDICT: Final = struct.Struct(f"<B{_REASON_BYTES}s")
"""Whether it went well, and if not, why."""


class Round:
    """One all-gather of a short letter per rank."""

    def __init__(self, world: int, own: bytes, *, all_linked: bool = True) -> None:
        """`all_linked`: all pairs have links, or shall have. Else a ring of them does."""
        size = len(own)
        self._all_linked = all_linked
        self._own = ctypes.create_string_buffer(own, size)
        self._all = [ctypes.create_string_buffer(size) for _ in range(world)]

    def collective(self) -> Collective:
        slots = [(ctypes.addressof(each), len(each)) for each in (*self._all, self._own)]
        total = len(self._own) * len(self._all)
        if self._all_linked:
            return Collective(Operation.INTRODUCTION, Algorithm.DIRECT, slots, total, DType.BYTES)
        return Collective(Operation.ALL_GATHER, Algorithm.RING, slots, total, DType.BYTES)

    def letters(self) -> list[bytes]:
        return [each.raw for each in self._all]


def judged(members: Sequence[int], problem: str) -> Generator[Collective, None, str]:
    """What the first rank that has a problem says of it; nothing if none has."""
    told = problem.encode()[:_REASON_BYTES]
    verdicts = Round(len(members), _VERDICT.pack(not problem, told))
    yield verdicts.collective()
    for peer, verdict in enumerate(verdicts.letters()):
        good, reason = _VERDICT.unpack(verdict)
        if not good:
            return reason_of(members[peer], reason)
    return ""


def reason_of(member: int, reason: bytes) -> str:
    """What a member gave as its reason, as one line that a terminal can show."""
    line = "; ".join(reason.rstrip(bytes(1)).decode(errors="replace").splitlines())
    shown = "".join(letter if letter.isprintable() else "?" for letter in line)
    return f"rank {member}: {shown}"
