"""How the ranks of a group agree: by small collectives of the group itself, which are sealed.

The records prove who sent bytes and reasons. A number, however, may be changed by a rank that
passes it on. That is acceptable, because the numbers decide only which way records take, and
records are sealed on every way. Each rank needs only a few links, whatever the size of the group:
numbers and objections use the tree over which the group formed, and bytes use a ring.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Final

from sealring.core.engine.collective import Collective, DType, ReduceKind
from sealring.core.schedule import REDUCING, Algorithm, Operation
from sealring.errors import GroupClosed

_REASON_BYTES: Final = 1024
_SHORT_BYTES: Final = 16
"""A multiple of every element's size."""


def least(own: int) -> Generator[Collective, None, int]:
    """Yields a collective; returns the least of all ranks' numbers.

    Raises GroupClosed if another rank left out this rank's number.
    """
    value = ctypes.c_uint32(own)
    slot = (ctypes.addressof(value), ctypes.sizeof(value))
    yield Collective(
        Operation.INTRODUCTION, Algorithm.TREE, [slot], slot[1], DType.UINT32, ReduceKind.MIN
    )
    if value.value > own:
        raise GroupClosed(
            f"the ranks agreed on {value.value}, and this one said {own}: a rank between them left "
            "its number out. Make a new group without that rank."
        )
    return value.value


def first_objection(
    rank: int, members: Sequence[int], objection: str
) -> Generator[Collective, None, str]:
    """Returns '' on all ranks if none objects, else the objection of the first rank that does.

    `members` has each rank's number in the job, which the returned text names.
    """
    world = len(members)
    first = yield from least(rank if objection else world)
    if first >= world:
        return ""
    own = objection or "this rank has no objection, another one claimed one in its name"
    # The text may contain a file name that is not UTF-8.
    told = own.encode(errors="backslashreplace")[:_REASON_BYTES] if first == rank else b""
    reason = ctypes.create_string_buffer(told, _REASON_BYTES)
    text = (ctypes.addressof(reason), _REASON_BYTES)
    yield Collective(Operation.OBJECTION, Algorithm.TREE, [text], text[1], DType.BYTES, root=first)
    return f"rank {members[first]}: {_one_line(reason.value)}"


def _one_line(reason: bytes) -> str:
    """A member's reason as one line without characters that a terminal cannot show."""
    line = "; ".join(reason.decode(errors="replace").splitlines())
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def tried(
    rank: int, members: Sequence[int], step: Callable[[], None]
) -> Generator[Collective, None, str]:
    """Calls `step` on each rank; returns '' if all succeed, else the first failed rank's reason."""
    objection = ""
    try:
        step()
    except Exception as error:  # any error: the other ranks must not wait for this one
        objection = str(error) or repr(error)
    return (yield from first_objection(rank, members, objection))


def all_gather_bytes(world: int, own: bytes) -> Generator[Collective, None, list[bytes]]:
    """Yields a collective; returns the bytes of all ranks, by rank. All must have one length."""
    size = len(own)
    mine = ctypes.create_string_buffer(own, size)
    all_of_them = [ctypes.create_string_buffer(size) for _ in range(world)]
    slots = [(ctypes.addressof(each), size) for each in (*all_of_them, mine)]
    yield Collective(Operation.ALL_GATHER, Algorithm.RING, slots, size * world, DType.BYTES)
    return [each.raw for each in all_of_them]


def linked(collective: Collective) -> Generator[Collective, None, None]:
    """Yields the collective as a dry run with 16 bytes per slot, which creates its links."""
    memory = [ctypes.create_string_buffer(_SHORT_BYTES) for _ in collective.slots]
    slots = [(ctypes.addressof(each), _SHORT_BYTES) for each in memory]
    reduces = collective.operation in REDUCING
    yield replace(
        collective,
        slots=slots,
        total=None if collective.total is None else _SHORT_BYTES,
        dtype=DType.UINT32 if reduces else DType.BYTES,
        reduction=ReduceKind.MIN if reduces else ReduceKind.NONE,
        ready=None,
    )
