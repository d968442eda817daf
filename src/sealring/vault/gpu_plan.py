"""Which bytes of which sealed files a batch needs, and what a GPU is to do with them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sealring import _native
from sealring.engine.cuda.chunks import CHUNK, CHUNK_BYTES, FIRST_CHUNK_AT, SEALED_CHUNK_BYTES
from sealring.errors import ConfigurationError, TruncatedFile

_FILE_SHIFT: Final = 40
"""A chunk's key is the file's number above these bits, and the chunk's number below."""
_ALIGNED: Final = 16
"""Where ciphertext of a chunk may begin in the GPU's memory."""


@dataclass(frozen=True, slots=True)
class SealedPart:
    """A sealed file with its key: AEAD_CHACHA20_POLY1305, the suite for GPUs."""

    source: int | Callable[[int, int], bytes]
    """A descriptor, or a function of offset and size that reads ranges of a store."""
    reader: _native.SealedFileReader
    name: str

    def read_into(self, offset: int, memory: memoryview) -> None:
        done, size = 0, len(memory)
        while done < size:
            if isinstance(self.source, int):
                got = os.preadv(self.source, [memory[done:]], offset + done)
            else:
                came = self.source(offset + done, size - done)
                got = len(came)
                memory[done : done + got] = came
            if got == 0:
                raise TruncatedFile(
                    f"{self.name} became shorter while it was read: restore it from a copy"
                )
            done += got


class SealedParts(Protocol):
    """Files by their number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> SealedPart: ...


class Sample(NamedTuple):
    """Bytes of a file's plaintext."""

    file: int
    offset: int
    bytes: int


SAMPLE: Final = np.dtype([("file", "<i8"), ("offset", "<i8"), ("bytes", "<i8")])
Samples = Sequence[Sample] | NDArray[np.void]
"""As they are written, or as an array of SAMPLE, which costs less for many of them."""


@dataclass(frozen=True, slots=True)
class Read:
    """A run of bytes of a sealed file, and its place in the ciphertext of the batch."""

    file: int
    offset: int
    bytes: int
    to: int


@dataclass(frozen=True, slots=True)
class Plan:
    samples: NDArray[np.void]
    reads: list[Read]
    chunks: NDArray[np.void]
    """What the kernel is given: each chunk once, in the order of files and chunks."""
    starts: NDArray[np.int64]
    """Where each sample begins in the plaintext."""
    sealed_bytes: int
    plain_bytes: int


def plan_of(samples: Samples, files: SealedParts) -> Plan:
    """Chunks that are neighbours in a file are neighbours in the batch: a sample is one run."""
    listed = np.asarray(samples, SAMPLE)
    file, offset, size = listed["file"], listed["offset"], listed["bytes"]
    used, where = np.unique(file, return_inverse=True)
    lengths = np.array([files[one].reader.length for one in used.tolist()], dtype=np.int64)
    wrong = np.flatnonzero((offset < 0) | (size < 0) | (offset + size > lengths[where]))
    if len(wrong):
        one = Sample(*listed[wrong[0]].tolist())
        raise ConfigurationError(
            f"{files[one.file].name} holds {files[one.file].reader.length} bytes, and {one.bytes} "
            f"from {one.offset} on were asked for"
        )
    first = offset // CHUNK_BYTES
    counts = np.where(size > 0, -(-(offset + size) // CHUNK_BYTES) - first, 0)
    first_keys = (file << _FILE_SHIFT) + first
    before = np.cumsum(counts) - counts
    keys = np.unique(np.repeat(first_keys - before, counts) + np.arange(int(counts.sum())))

    chunks = np.zeros(len(keys), CHUNK)
    chunks["file"] = keys >> _FILE_SHIFT
    chunks["number"] = keys & ((1 << _FILE_SHIFT) - 1)
    number = chunks["number"].astype(np.int64)
    length = lengths[np.searchsorted(used, keys >> _FILE_SHIFT)]
    plain = np.minimum(CHUNK_BYTES, length - number * CHUNK_BYTES)
    sealed = plain + (SEALED_CHUNK_BYTES - CHUNK_BYTES)
    room = -(-sealed // _ALIGNED) * _ALIGNED
    chunks["from"] = np.cumsum(room) - room
    chunks["to"] = np.arange(len(keys)) * CHUNK_BYTES
    chunks["bytes"] = plain

    # Only the last chunk of a file is shorter, so a run of neighbours has no gaps.
    firsts = np.flatnonzero(np.diff(keys, prepend=-2) != 1)
    ends = np.append(firsts, len(keys))[1:]
    totals = np.append(0, np.cumsum(sealed))
    reads = [
        Read(
            int(chunks["file"][start]),
            FIRST_CHUNK_AT + int(number[start]) * SEALED_CHUNK_BYTES,
            int(totals[end] - totals[start]),
            int(chunks["from"][start]),
        )
        for start, end in zip(firsts.tolist(), ends.tolist(), strict=True)
    ]
    places = np.searchsorted(keys, first_keys)
    starts = np.where(size > 0, places * CHUNK_BYTES + offset - first * CHUNK_BYTES, 0)
    return Plan(listed, reads, chunks, starts, int(room.sum()), len(keys) * CHUNK_BYTES)
