"""How the ranks of a group agree: by small collectives of the group itself.

So what they tell is sealed. Bytes and reasons come from the member that they say they come from;
a rank in between may change a number. They decide only which way records take, which are sealed on
all ways. A group of any size agrees over a few links of each rank: numbers and objections take the
tree over which the group formed, and need no other links; bytes take a ring.
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
    """The least of all ranks' numbers; GroupClosed if another rank left this one's out."""
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
    """Returns '' on all ranks if none objects, else what the first that does says of it.

    `members` are the group's ranks by their numbers in the job, which the reason names.
    """
    world = len(members)
    first = yield from least(rank if objection else world)
    if first >= world:
        return ""
    own = objection or "this rank has no objection, another one claimed one in its name"
    # A path's name that is not UTF-8 has letters that cannot be encoded.
    told = own.encode(errors="backslashreplace")[:_REASON_BYTES] if first == rank else b""
    reason = ctypes.create_string_buffer(told, _REASON_BYTES)
    text = (ctypes.addressof(reason), _REASON_BYTES)
    yield Collective(Operation.OBJECTION, Algorithm.TREE, [text], text[1], DType.BYTES, root=first)
    return f"rank {members[first]}: {_one_line(reason.value)}"


def _one_line(reason: bytes) -> str:
    """What a member gave as its reason, as a terminal can show it."""
    line = "; ".join(reason.decode(errors="replace").splitlines())
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def tried(
    rank: int, members: Sequence[int], step: Callable[[], None]
) -> Generator[Collective, None, str]:
    """Takes a step on each rank; returns '' if all could, else why the first could not."""
    objection = ""
    try:
        step()
    except Exception as error:  # whatever it is, the others must not wait for this rank
        objection = str(error) or repr(error)
    return (yield from first_objection(rank, members, objection))


def all_gather_bytes(world: int, own: bytes) -> Generator[Collective, None, list[bytes]]:
    """The bytes of all ranks, by rank. They are of one length."""
    size = len(own)
    mine = ctypes.create_string_buffer(own, size)
    all_of_them = [ctypes.create_string_buffer(size) for _ in range(world)]
    slots = [(ctypes.addressof(each), size) for each in (*all_of_them, mine)]
    yield Collective(Operation.ALL_GATHER, Algorithm.RING, slots, size * world, DType.BYTES)
    return [each.raw for each in all_of_them]


def linked(collective: Collective) -> Generator[Collective, None, None]:
    """The same program with next to nothing to do: links that it needs are made with it."""
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
