"""What can be said of captured traffic, computed from it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

_WINDOW: Final = 8
"""Shorter pieces occur in any long stream by chance."""
_STRIDE: Final = 4
"""Plaintext is cut at every float."""
SHORTEST_RUN: Final = _WINDOW + _STRIDE - 1
"""A piece of plaintext of so many bytes holds a whole window wherever it begins: it is found."""
_ENOUGH_HITS: Final = 64


def entropy(data: bytes | bytearray) -> float:
    """Bits per byte, from how often each byte value occurs; 8 for bytes without any pattern."""
    if not data:
        return 0.0
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    shares = counts[counts > 0] / len(data)
    return max(0.0, -float(np.sum(shares * np.log2(shares))))


def longest_plaintext_run(stream: bytes, plaintexts: Iterable[bytes]) -> int:
    """The length of the longest piece of a plaintext found in the stream; 0 if there is none.

    None of SHORTEST_RUN bytes or more goes unseen. Where there are very many, the first of them
    are measured.
    """
    return max((_longest(stream, plaintext) for plaintext in plaintexts), default=0)


def _longest(stream: bytes, plaintext: bytes) -> int:
    windows = _windows(plaintext)
    if not len(windows) or len(stream) < _WINDOW:
        return 0
    order = np.argsort(windows, kind="stable")
    ordered = windows[order]
    longest = 0
    for shift in range(_WINDOW):
        words = np.frombuffer(stream, "<u8", (len(stream) - shift) // _WINDOW, shift)
        found = np.minimum(np.searchsorted(ordered, words), len(ordered) - 1)
        for index in np.flatnonzero(ordered[found] == words)[:_ENOUGH_HITS]:
            at, place = int(index) * _WINDOW + shift, int(order[found[index]]) * _STRIDE
            before = _agreement(stream[:at][::-1], plaintext[:place][::-1])
            longest = max(longest, before + _agreement(stream[at:], plaintext[place:]))
    return longest


def _windows(data: bytes) -> NDArray[np.uint64]:
    count = (len(data) - _WINDOW) // _STRIDE + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    halves = np.frombuffer(data, "<u4", count + 1).astype(np.uint64)
    return halves[:-1] | halves[1:] << np.uint64(32)


def _agreement(one: bytes, other: bytes) -> int:
    """How many bytes both begin with."""
    length = min(len(one), len(other))
    differ = np.frombuffer(one, np.uint8, length) != np.frombuffer(other, np.uint8, length)
    return int(np.argmax(differ)) if differ.any() else length
