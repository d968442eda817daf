"""Batches that travel from the disk to a GPU as ciphertext, and are opened there.

The CPU decrypts nothing: it reads the chunks that hold the wanted samples into pinned memory, the
GPU copies them into its own memory, authenticates and opens them there. A thread does this for the
next batches while the current one is computed with.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from sealring import _native
from sealring.engine.cuda.chunks import (
    CHUNK,
    CHUNK_BYTES,
    FIRST_CHUNK_AT,
    NO_FAILURE,
    SEALED_CHUNK_BYTES,
    ChunkKernels,
)
from sealring.engine.cuda.streams import new_event, new_stream
from sealring.errors import ConfigurationError, TamperedChunk, TruncatedFile

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SMALLEST_BUFFER: Final = 1 << 20
_PIECE_BYTES: Final = 4 << 20
_READERS: Final = 4


@dataclass(frozen=True, slots=True)
class SealedPart:
    """A sealed file with its key: AEAD_CHACHA20_POLY1305, the suite for GPUs."""

    descriptor: int
    reader: _native.SealedFileReader
    name: str


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes of a file's plaintext."""

    file: int
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Opened samples in the GPU's memory."""

    plain: torch.Tensor
    starts: tuple[int, ...]
    """Where each sample begins in `plain`."""
    samples: tuple[Sample, ...]

    def __getitem__(self, index: int) -> torch.Tensor:
        start = self.starts[index]
        return self.plain[start : start + self.samples[index].bytes]

    def rows(self, dtype: torch.dtype) -> torch.Tensor:
        """All samples as the rows of one tensor. They have the same length."""
        if len({sample.bytes for sample in self.samples}) != 1:
            raise ConfigurationError("samples of different lengths do not form rows: take each")
        width = self.samples[0].bytes
        if width % dtype.itemsize:
            raise ConfigurationError(f"samples of {width} bytes do not hold whole {dtype}")
        return torch.stack([self[index] for index in range(len(self.samples))]).view(dtype)


@dataclass(slots=True)
class Plan:
    """Which bytes of which files a batch needs, and what the GPU is to do with them."""

    samples: tuple[Sample, ...]
    reads: list[tuple[int, int, int, int]]
    """File, offset in it, bytes, offset in the ciphertext."""
    chunks: NDArray[np.void]
    starts: tuple[int, ...]
    sealed_bytes: int
    plain_bytes: int


def plan_of(samples: Sequence[Sample], files: Sequence[SealedPart]) -> Plan:
    """Every sample's chunks lie behind each other, so that the sample is one run of bytes."""
    reads: list[tuple[int, int, int, int]] = []
    listed: list[NDArray[np.void]] = []
    starts: list[int] = []
    sealed = plain = 0
    for sample in samples:
        length = files[sample.file].reader.length
        if sample.offset < 0 or sample.bytes <= 0 or sample.offset + sample.bytes > length:
            raise ConfigurationError(
                f"{files[sample.file].name} holds {length} bytes, and {sample.bytes} from "
                f"{sample.offset} on were asked for"
            )
        first = sample.offset // CHUNK_BYTES
        count = (sample.offset + sample.bytes - 1) // CHUNK_BYTES + 1 - first
        end = min((first + count) * CHUNK_BYTES, length)
        starts.append(plain + sample.offset - first * CHUNK_BYTES)
        chunks = np.empty(count, CHUNK)
        place = np.arange(count, dtype=np.uint64)
        chunks["from"] = sealed + place * SEALED_CHUNK_BYTES
        chunks["to"] = plain + place * CHUNK_BYTES
        chunks["number"] = first + place
        chunks["bytes"] = CHUNK_BYTES
        chunks["bytes"][-1] = end - (first + count - 1) * CHUNK_BYTES
        chunks["file"] = sample.file
        listed.append(chunks)
        size = end - first * CHUNK_BYTES + count * (SEALED_CHUNK_BYTES - CHUNK_BYTES)
        reads.append((sample.file, FIRST_CHUNK_AT + first * SEALED_CHUNK_BYTES, size, sealed))
        sealed = -(-(sealed + size) // 16) * 16
        plain += count * CHUNK_BYTES
    chunks = np.concatenate(listed) if listed else np.empty(0, CHUNK)
    return Plan(tuple(samples), reads, chunks, tuple(starts), sealed, plain)


@dataclass(frozen=True, slots=True)
class _Streams:
    copies: torch.cuda.Stream
    opens: torch.cuda.Stream
    checks: torch.cuda.Stream
    """Its own, so that a check does not wait for the batches behind."""


class Slot:
    """The memory of one batch under way."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.pinned = torch.empty(0, dtype=torch.uint8)
        self.sealed = torch.empty(0, dtype=torch.uint8)
        self.failed = torch.full((1,), NO_FAILURE, dtype=torch.int64, device=device)
        self.opened = new_event()
        self.plan: Plan | None = None
        self.kept: list[torch.Tensor] = []
        self.plain = self.failed

    def make_room(self, size: int) -> None:
        if self.pinned.nbytes < size:
            room = max(_SMALLEST_BUFFER, 1 << (size - 1).bit_length())
            self.pinned = torch.empty(room, dtype=torch.uint8, pin_memory=True)
            self.sealed = torch.empty(room, dtype=torch.uint8, device=self._device)


class GpuBatches:
    """Opens batches on a GPU, `ahead` of them before they are asked for.

    Iterating gives the batches in their order. An error of a batch is raised in its place.
    """

    def __init__(
        self,
        device: torch.device | str,
        files: Sequence[SealedPart],
        batches: Iterable[Sequence[Sample]],
        *,
        ahead: int = 2,
    ) -> None:
        if ahead < 1:
            raise ConfigurationError("at least one batch must be under way: ahead=1 or more")
        self._device = torch.device(device)
        self._files = list(files)
        self._batches = batches
        self._ahead = ahead
        self._kernels = ChunkKernels(self._device, [file.reader for file in self._files])

    def __iter__(self) -> Iterator[Batch]:
        ready: queue.Queue[Batch | BaseException | None] = queue.Queue(self._ahead)
        stopped = threading.Event()
        thread = threading.Thread(
            target=self._run, args=(ready, stopped), name="sealring-batches", daemon=True
        )
        thread.start()
        try:
            while (batch := ready.get()) is not None:
                if isinstance(batch, BaseException):
                    raise batch
                # It was opened on another stream: it is not given back before this one is done.
                batch.plain.record_stream(torch.cuda.current_stream(self._device))
                yield batch
        finally:
            stopped.set()
            while thread.is_alive():  # it may wait for room in the queue
                _empty(ready)
                thread.join(0.01)

    def plan(self, samples: Sequence[Sample]) -> Plan:
        return plan_of(samples, self._files)

    def open(self, plan: Plan, slot: Slot) -> list[torch.Tensor]:
        """On the current stream. What is returned is kept until the stream has passed this."""
        return [self._kernels.open(slot.sealed, plan.chunks, slot.plain, slot.failed)]

    def close(self) -> None:
        """Overwrites the keys in the GPU's memory."""
        torch.cuda.synchronize(self._device)
        self._kernels.wipe()

    # ---- in the thread

    def _run(self, ready: queue.Queue[Any], stopped: threading.Event) -> None:
        try:
            with (
                torch.cuda.device(self._device),
                ThreadPoolExecutor(_READERS, "sealring-read") as self._readers,
            ):
                self._open_all(ready, stopped)
            ready.put(None)
        except BaseException as problem:
            ready.put(problem)

    def _open_all(self, ready: queue.Queue[Any], stopped: threading.Event) -> None:
        streams = _Streams(*(new_stream(self._device) for _ in range(3)))
        # One more than are under way, so that one can be filled from the disk meanwhile. In the
        # stream that uses them: in another, what is there before could still be written.
        with torch.cuda.stream(streams.opens):
            free = deque(Slot(self._device) for _ in range(self._ahead + 1))
        under_way: deque[Slot] = deque()
        for samples in self._batches:
            if stopped.is_set():
                break
            slot = free.popleft()
            plan = slot.plan = self.plan(samples)
            with torch.cuda.stream(streams.copies):
                slot.make_room(plan.sealed_bytes)
            self._read(plan, slot)
            self._start(plan, slot, streams)
            under_way.append(slot)
            if len(under_way) > self._ahead:
                self._hand_over(streams, under_way, free, ready)
        while under_way and not stopped.is_set():
            self._hand_over(streams, under_way, free, ready)
        torch.cuda.synchronize(self._device)  # nothing under way uses what is freed now

    def _read(self, plan: Plan, slot: Slot) -> None:
        """By several threads: one alone copies from the page cache slower than the GPU takes it."""
        memory = slot.pinned.numpy().data
        pieces = [
            (file, offset + at, min(_PIECE_BYTES, size - at), to + at)
            for file, offset, size, to in plan.reads
            for at in range(0, size, _PIECE_BYTES)
        ]
        if len(pieces) == 1:
            self._read_piece(memory, pieces[0])
        else:
            list(self._readers.map(lambda piece: self._read_piece(memory, piece), pieces))

    def _read_piece(self, memory: memoryview, piece: tuple[int, int, int, int]) -> None:
        file, offset, size, to = piece
        part, done = self._files[file], 0
        while done < size:
            got = os.preadv(part.descriptor, [memory[to + done : to + size]], offset + done)
            if got == 0:
                raise TruncatedFile(
                    f"{part.name} became shorter while it was read: restore it from a copy"
                )
            done += got

    def _start(self, plan: Plan, slot: Slot, streams: _Streams) -> None:
        opens = streams.opens
        with torch.cuda.stream(streams.copies):
            slot.sealed[: plan.sealed_bytes].copy_(
                slot.pinned[: plan.sealed_bytes], non_blocking=True
            )
        opens.wait_stream(streams.copies)
        with torch.cuda.stream(opens):
            slot.failed.fill_(NO_FAILURE)
            slot.plain = torch.empty(plan.plain_bytes, dtype=torch.uint8, device=self._device)
            slot.kept = self.open(plan, slot)
            slot.opened.record(opens)

    def _hand_over(
        self,
        streams: _Streams,
        under_way: deque[Slot],
        free: deque[Slot],
        ready: queue.Queue[Any],
    ) -> None:
        slot = under_way.popleft()
        slot.opened.synchronize()
        plan, plain = slot.plan, slot.plain
        assert plan is not None
        with torch.cuda.stream(streams.checks):
            failed = int(slot.failed.item())
        if failed != NO_FAILURE:
            chunk = plan.chunks[failed]
            raise TamperedChunk(
                f"chunk {int(chunk['number'])} of {self._files[int(chunk['file'])].name} is not "
                "what was sealed there: it was changed. Restore the file from a copy"
            )
        slot.kept, slot.plain = [], slot.failed
        free.append(slot)
        ready.put(Batch(plain, plan.starts, plan.samples))


def _empty(ready: queue.Queue[Any]) -> None:
    """Takes out what waits in the queue."""
    while True:
        try:
            ready.get_nowait()
        except queue.Empty:
            return
