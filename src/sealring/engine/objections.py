"""Whether a rank of a group objects to it, told to all ranks along the tree over which it formed.

For groups whose other links are made when they are first needed: this needs none of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Sequence
from typing import Final

from sealring.engine.collective import Collective
from sealring.engine.datatypes import DType, ReduceKind
from sealring.engine.rounds import reason_of
from sealring.schedule import Algorithm, Operation

_REASON_BYTES: Final = 1024


def first_objection(
    rank: int, members: Sequence[int], objection: str
) -> Generator[Collective, None, str]:
    """The collectives by which ranks learn it; returns '' on all ranks, or the first rank's reason.

    `members` are the group's ranks by their numbers in the job, which the reason names.
    """
    world = len(members)
    first = ctypes.c_uint32(rank if objection else world)
    number = (ctypes.addressof(first), ctypes.sizeof(first))
    yield Collective(
        Operation.ALL_REDUCE, Algorithm.TREE, [number], number[1], DType.UINT32, ReduceKind.MIN
    )
    if first.value >= world:
        return ""
    told = objection.encode()[:_REASON_BYTES] if first.value == rank else b""
    reason = ctypes.create_string_buffer(told, _REASON_BYTES)
    text = (ctypes.addressof(reason), _REASON_BYTES)
    yield Collective(
        Operation.BROADCAST, Algorithm.TREE, [text], text[1], DType.BYTES, root=first.value
    )
    return reason_of(members[first.value], reason.value)
