"""Searches this process's own memory for a secret that the search itself does not hold.

The caller passes the secret masked (`tests.attacks.key_search.masked`). Each block of memory is
masked before it is compared. So neither the search nor its caller leaves a copy that could be
found.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Final

import numpy as np

from tests.attacks.key_search import MASK

_BLOCK: Final = 1 << 20
_ROOM: Final = mmap.mmap(-1, 2 * _BLOCK)
"""Room for what is read, in a separate mapping that is not searched."""
_MEMORY: Final = np.frombuffer(_ROOM, dtype=np.uint8)
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4


def places(masked: str) -> list[int]:
    """Returns the addresses in writable memory at which the secret lies."""
    wanted = bytes.fromhex(masked)
    prctl = ctypes.CDLL(None).prctl
    before = prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0)
    prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    try:
        return [at for start, end in _writable() for at in _found(start, end, wanted)]
    finally:
        prctl(_PR_SET_DUMPABLE, before, 0, 0, 0)


def _writable() -> list[tuple[int, int]]:
    with open("/proc/self/maps") as listing:
        fields = [line.split() for line in listing]
    ranges = [one[0].split("-") for one in fields if one[1].startswith("rw")]
    mapped = [(int(start, 16), int(end, 16)) for start, end in ranges]
    room = _MEMORY.ctypes.data
    cut = [(start, min(end, room)) for start, end in mapped if start < room]
    return cut + [(max(start, room + len(_ROOM)), end) for start, end in mapped if end > room]


def _found(start: int, end: int, wanted: bytes) -> list[int]:
    found = []
    with open("/proc/self/mem", "rb", 0) as memory:
        for at in range(start, end, _BLOCK):
            size = min(_BLOCK + len(wanted), end - at)  # a secret may lie across a block's end
            try:
                got = os.preadv(memory.fileno(), [_MEMORY.data[:size]], at)
            except OSError:
                break
            np.bitwise_xor(_MEMORY, MASK, out=_MEMORY)
            inside = -1
            while (inside := _ROOM.find(wanted, inside + 1, got)) >= 0:
                found.append(at + inside)
            _MEMORY[:] = 0
    return found
