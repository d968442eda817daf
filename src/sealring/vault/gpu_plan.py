"""Which bytes of which sealed files a batch needs, and what a GPU is to do with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sealring import _native
from sealring.core.engine.cuda.chunks import (
    CHUNK,
    CHUNK_BYTES,
    FIRST_CHUNK_AT,
    ROW,
    SEALED_CHUNK_BYTES,
)
from sealring.errors import ConfigurationError

_FILE_SHIFT: Final = 40
"""A chunk's key is the file's number above these bits, and the chunk's number below."""
_LARGEST_ITEM: Final = 8
_ALIGNED: Final = 16
"""Where ciphertext of a chunk may begin in the GPU's memory."""


@dataclass(frozen=True, slots=True)
class SealedPart:
    """A sealed file with its key: AEAD_CHACHA20_POLY1305, the suite for GPUs."""

    reader: _native.SealedFileReader
    name: str


class SealedParts(Protocol):
    """Files by their number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> SealedPart: ...


class Sample(NamedTuple):
    """Bytes of a file's plaintext."""

    file: int
    offset: int
    bytes: int
    item: int = 1
    """The size of one of the numbers that they are, negative for signed ones."""
    pad: int = 0
    """What a row of more numbers is filled up with."""


SAMPLE: Final = np.dtype([(name, "<i8") for name in Sample._fields])
Samples = Sequence[Sample] | NDArray[np.void]
"""As they are written, or as an array of SAMPLE, which costs less for many of them."""
READ: Final = np.dtype([(name, "<u8") for name in ("file", "offset", "bytes", "to")])
"""A run of bytes of a sealed file, by its place in a list, and its place in the ciphertext."""


@dataclass(frozen=True, slots=True)
class Plan:
    samples: NDArray[np.void]
    files: dict[int, SealedPart]
    """Those that are read, in the order of their numbers."""
    reads: NDArray[np.void]
    """In the form of READ, by places in `files`."""
    chunks: NDArray[np.void]
    """What the kernel is given: each chunk once, in the order of files and chunks."""
    rows: NDArray[np.void]
    """Where each sample is in the plaintext, and what numbers it holds, in the form of ROW."""
    sealed_bytes: int
    plain_bytes: int


def plan_of(samples: Samples, files: SealedParts) -> Plan:
    """Chunks that are neighbours in a file are neighbours in the batch: a sample is one run."""
    listed = np.asarray(samples, SAMPLE)
    file, offset, size = listed["file"], listed["offset"], listed["bytes"]
    used = np.flatnonzero(np.bincount(file))
    parts = {one: files[one] for one in used.tolist()}
    lengths = np.zeros(max(parts, default=0) + 1, dtype=np.int64)
    for one, part in parts.items():
        lengths[one] = part.reader.length
    # Not their sum, which may be more than 64 bits hold.
    wrong = np.flatnonzero((offset < 0) | (size < 0) | (size > lengths[file] - offset))
    if len(wrong):
        sample = Sample(*listed[wrong[0]].tolist())
        raise ConfigurationError(
            f"{parts[sample.file].name} holds {lengths[sample.file]} bytes, and {sample.bytes} "
            f"from {sample.offset} on were asked for"
        )
    item = np.abs(listed["item"])
    odd = np.flatnonzero((item < 1) | (item > _LARGEST_ITEM) | (size % np.maximum(item, 1) != 0))
    if len(odd):
        sample = Sample(*listed[odd[0]].tolist())
        raise ConfigurationError(
            f"{sample.bytes} bytes of {parts[sample.file].name} are not whole numbers of "
            f"item={sample.item}: it is 1 to {_LARGEST_ITEM} bytes, negative for signed numbers"
        )
    first = offset // CHUNK_BYTES
    counts = np.where(size > 0, -(-(offset + size) // CHUNK_BYTES) - first, 0)
    first_keys = (file << _FILE_SHIFT) + first
    before = np.cumsum(counts) - counts
    keys = np.sort(np.repeat(first_keys - before, counts) + np.arange(counts.sum(), dtype=np.int64))
    keys = keys[np.diff(keys, prepend=-1) != 0]

    of_file, number = keys >> _FILE_SHIFT, keys & ((1 << _FILE_SHIFT) - 1)
    plain = np.minimum(CHUNK_BYTES, lengths[of_file] - number * CHUNK_BYTES)
    sealed = plain + (SEALED_CHUNK_BYTES - CHUNK_BYTES)
    room = -(-sealed // _ALIGNED) * _ALIGNED
    chunks = np.empty(len(keys), CHUNK)
    chunks["file"], chunks["number"], chunks["bytes"] = of_file, number, plain
    chunks["from"] = np.cumsum(room) - room
    chunks["to"] = np.arange(len(keys), dtype=np.int64) * CHUNK_BYTES

    # Only the last chunk of a file is shorter, so a run of neighbours has no gaps.
    firsts = np.flatnonzero(np.diff(keys, prepend=-2) != 1)
    reads = np.empty(len(firsts), READ)
    reads["file"] = np.searchsorted(used, of_file[firsts])
    reads["offset"] = FIRST_CHUNK_AT + number[firsts] * SEALED_CHUNK_BYTES
    reads["bytes"] = np.add.reduceat(sealed, firsts) if len(firsts) else 0
    reads["to"] = chunks["from"][firsts]

    rows = np.empty(len(listed), ROW)
    places = np.searchsorted(keys, first_keys)
    rows["from"] = np.where(size > 0, places * CHUNK_BYTES + offset - first * CHUNK_BYTES, 0)
    for name in ("bytes", "item", "pad"):
        rows[name] = listed[name]
    return Plan(listed, parts, reads, chunks, rows, int(room.sum()), len(keys) * CHUNK_BYTES)
