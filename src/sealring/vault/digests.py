"""The digests of a part's chunks: SHA-256 or BLAKE3, whichever this CPU computes faster.

SHA-256 runs in the native core. BLAKE3 is the package `blake3`, which releases Python's lock and
takes it again for each chunk. While another thread runs Python, it waits for the lock each time.
"""

from __future__ import annotations

import threading
import time
from functools import cache
from typing import Final, Literal

from blake3 import blake3

from sealring import _native
from sealring.core.hooks import run_notes

Hash = Literal["sha256", "blake3"]
"""A hash function, as manifests and statements name it."""
CHUNK_BYTES: Final = 16384
DIGEST_BYTES: Final = 32
_TRIED: Final = bytes(8 * CHUNK_BYTES - 1)
_TRIES: Final = 5
_FASTER: Final = 1.5
"""BLAKE3 is chosen if it is this many times faster. With 1.0, near-equal rates would change the
choice from run to run."""


def _blake3_of_chunks(plain: memoryview, step: int, count: int) -> bytes:
    return b"".join(
        [blake3(plain[at : at + CHUNK_BYTES]).digest() for at in range(0, step * count, step)]
    )


_COMPUTED: Final[dict[Hash, _native.ChunkHash]] = {"sha256": "sha256", "blake3": _blake3_of_chunks}


def computed(name: Hash) -> _native.ChunkHash:
    """The hash function in the form that the native core's writers and readers take."""
    return _COMPUTED[name]


@cache
def rate_of(name: Hash) -> float:
    """Bytes a second on one core, the best of a few short tries. Measured once in a process."""
    return len(_TRIED) / min(_seconds(name) for _ in range(_TRIES))


def _seconds(name: Hash) -> float:
    start = time.perf_counter()
    _native.chunk_digests(_TRIED, computed(name))
    return time.perf_counter() - start


def faster() -> Hash:
    """The hash function of a new part's digests, if its writer does not choose one.

    SHA-256 outside the main thread, because the main thread runs Python meanwhile. SHA-256 also in
    a recorded run: a repetition on another CPU must compute the same digests of its checkpoints.
    """
    beside = threading.current_thread() is not threading.main_thread()
    if beside or any(notes.recorded() for notes in run_notes.all()):
        return "sha256"
    return "blake3" if rate_of("blake3") > _FASTER * rate_of("sha256") else "sha256"
