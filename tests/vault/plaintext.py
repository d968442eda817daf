"""Finds plaintext: every run of 16 bytes of what must stay secret, at every offset."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

RUN = 16
_HALF = RUN // 2
_DIFFERENT = 6
"""Fewer different bytes than this, such as zeros, are found everywhere and show nothing."""
_TABLE_BITS = 24
_BLOCK = 1 << 18
Words = npt.NDArray[np.uint64]


class Plaintext:
    """All runs of 16 bytes of some secrets."""

    def __init__(self, secrets: Iterable[bytes]) -> None:
        contents = [np.frombuffer(one, np.uint8) for one in set(secrets) if len(one) >= RUN]
        runs = np.concatenate([_windows(one, RUN) for one in contents])
        ordered = np.sort(runs, axis=1)
        different = 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1)
        kept = runs[different >= _DIFFERENT]
        self.runs, self.left_out = len(kept), len(runs) - len(kept)
        heads, tails = _words(kept[:, :_HALF]), _words(kept[:, _HALF:])
        order = np.argsort(heads)
        self._heads, self._tails = heads[order], tails[order]
        self._table = np.zeros(1 << _TABLE_BITS, dtype=bool)
        self._table[_slots(heads)] = True

    def find(self, content: bytes | bytearray | memoryview) -> int | None:
        """Where the first run lies in it."""
        whole = np.frombuffer(content, np.uint8)
        for start in range(0, max(0, len(whole) - RUN + 1), _BLOCK):
            block = whole[start : start + _BLOCK + RUN - 1]
            if not block.any():
                continue
            words = _words_at_each_offset(block)
            heads, tails = words[:-_HALF], words[_HALF:]
            likely = np.flatnonzero(self._table[_slots(heads)])
            first = np.searchsorted(self._heads, heads[likely], side="left")
            last = np.searchsorted(self._heads, heads[likely], side="right")
            for place in np.flatnonzero(first < last).tolist():
                if tails[likely[place]] in self._tails[first[place] : last[place]]:
                    return int(start + likely[place])
        return None


def _windows(content: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.uint8]:
    return np.lib.stride_tricks.sliding_window_view(content, size)


def _words(halves: npt.NDArray[np.uint8]) -> Words:
    return np.ascontiguousarray(halves).view("<u8").reshape(-1)


def _words_at_each_offset(content: npt.NDArray[np.uint8]) -> Words:
    found = np.empty(len(content) - _HALF + 1, dtype="<u8")
    for shift in range(_HALF):
        whole = (len(content) - shift) // _HALF * _HALF
        found[shift::_HALF] = content[shift : shift + whole].view("<u8")
    return found


def _slots(words: Words) -> Any:
    return (words * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - _TABLE_BITS)


def files_of(folder: Path) -> Iterator[tuple[str, bytes]]:
    """All files of one file system. One that is gone before it is read is left out."""
    device = folder.stat().st_dev
    for inside, folders, names in os.walk(folder):
        here = Path(inside)
        folders[:] = [one for one in folders if (here / one).lstat().st_dev == device]
        for name in names:
            path = here / name
            with suppress(FileNotFoundError):
                if path.is_file() and not path.is_symlink():
                    yield str(path), path.read_bytes()


def memory_files_of(processes: Iterable[int]) -> Iterator[tuple[str, bytes]]:
    """Files without a name that processes have mapped: sealring's links on one host are such."""
    known = set()
    for process in processes:
        for entry in Path(f"/proc/{process}/map_files").iterdir():
            with suppress(FileNotFoundError):  # unmapped meanwhile
                name, number = os.readlink(entry), entry.stat().st_ino
                if name.startswith("/memfd:") and number not in known:
                    known.add(number)
                    yield f"{name} {number}", entry.read_bytes()
