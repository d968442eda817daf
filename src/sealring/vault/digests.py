"""What digests a part's chunks have: SHA-256 or BLAKE3, whichever this CPU computes faster.

SHA-256 runs in the native core. BLAKE3 is the package `blake3`, which gives Python's lock back for
each chunk and takes it again: where another thread runs Python meanwhile, it waits each time.
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
"""As manifests and statements name it."""
CHUNK_BYTES: Final = 16384
DIGEST_BYTES: Final = 32
_TRIED: Final = bytes(8 * CHUNK_BYTES - 1)
_TRIES: Final = 5
_FASTER: Final = 1.5
"""So many times faster BLAKE3 must be: else near-equal rates would change the choice."""


def _blake3_of_chunks(plain: memoryview, step: int, count: int) -> bytes:
    return b"".join(
        [blake3(plain[at : at + CHUNK_BYTES]).digest() for at in range(0, step * count, step)]
    )


_COMPUTED: Final[dict[Hash, _native.ChunkHash]] = {"sha256": "sha256", "blake3": _blake3_of_chunks}


def computed(name: Hash) -> _native.ChunkHash:
    """For the native core's writers and readers."""
    return _COMPUTED[name]


@cache
def rate_of(name: Hash) -> float:
    """Bytes a second on one core: the fastest of a few short tries, once in a process."""
    return len(_TRIED) / min(_seconds(name) for _ in range(_TRIES))


def _seconds(name: Hash) -> float:
    start = time.perf_counter()
    _native.chunk_digests(_TRIED, computed(name))
    return time.perf_counter() - start


def faster() -> Hash:
    """What a new part's digests are, if its writer does not say.

    SHA-256 in a thread beside the main one, which runs Python. And in a recorded run: a repetition
    on another CPU must come to the same digest of what its checkpoints hold.
    """
    beside = threading.current_thread() is not threading.main_thread()
    if beside or any(notes.recorded() for notes in run_notes.all()):
        return "sha256"
    return "blake3" if rate_of("blake3") > _FASTER * rate_of("sha256") else "sha256"
