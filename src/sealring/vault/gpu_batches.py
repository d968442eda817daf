"""Batches that travel from the disk to a GPU as ciphertext, and are opened there.

The CPU decrypts nothing. It reads the chunks that hold the wanted samples into pinned memory. The
GPU copies them into its own memory, then authenticates and opens them there. A thread prepares the
next batches while the caller computes with the current one.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from sealring import _native
from sealring.core.engine.cuda.chunks import (
    CHUNK,
    CHUNK_BYTES,
    FIRST_CHUNK_AT,
    NO_FAILURE,
    ROW,
    SEALED_CHUNK_BYTES,
    ChunkKernels,
    Listed,
)
from sealring.core.engine.streams import new_event, new_stream
from sealring.errors import (
    AlreadyClosed,
    ConfigurationError,
    ForkedProcess,
    TamperedChunk,
    Unsupported,
)
from sealring.vault.closing import Closable

_FILE_SHIFT: Final = 40
"""A chunk's key holds the chunk's number in this many low bits, and the file's number above."""
_LARGEST_ITEM: Final = 8
_ALIGNED: Final = 16
"""A chunk's ciphertext begins at a multiple of this in the GPU's memory."""


@dataclass(frozen=True, slots=True)
class SealedPart:
    """A sealed file with its key, in the suite for GPUs, AEAD_CHACHA20_POLY1305."""

    reader: _native.SealedFileReader
    name: str


class SealedParts(Protocol):
    """Sealed files by their numbers."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> SealedPart: ...


class Sample(NamedTuple):
    """A run of bytes of a file's plaintext."""

    file: int
    offset: int
    bytes: int
    item: int = 1
    """The bytes of each number in the run; negative for signed numbers."""
    pad: int = 0
    """The number that fills up a longer row."""


SAMPLE: Final = np.dtype([(name, "<i8") for name in Sample._fields])
Samples = Sequence[Sample] | NDArray[np.void]
"""A sequence of Sample, or an array of SAMPLE, which is faster for many samples."""
READ: Final = np.dtype([(name, "<u8") for name in ("file", "offset", "bytes", "to")])
"""A run of bytes of a sealed file: the file's index in a list, the run's offset and length, and
where it goes in the batch's ciphertext."""


@dataclass(frozen=True, slots=True)
class Plan:
    samples: NDArray[np.void]
    files: dict[int, SealedPart]
    """The files that are read, in the order of their numbers."""
    reads: NDArray[np.void]
    """An array of READ. Its `file` is the index in `files`."""
    chunks: NDArray[np.void]
    """The kernel's input: each chunk once, in the order of files and chunks."""
    rows: NDArray[np.void]
    """An array of ROW: where each sample is in the plaintext, and what numbers it holds."""
    sealed_bytes: int
    plain_bytes: int


def plan_of(samples: Samples, files: SealedParts) -> Plan:
    """Plans which chunks to read for these samples.

    Chunks that are neighbours in a file are neighbours in the batch, so a sample is one run.
    """
    listed = np.asarray(samples, SAMPLE)
    file, offset, size = listed["file"], listed["offset"], listed["bytes"]
    used = np.flatnonzero(np.bincount(file))
    parts = {one: files[one] for one in used.tolist()}
    lengths = np.zeros(max(parts, default=0) + 1, dtype=np.int64)
    for one, part in parts.items():
        lengths[one] = part.reader.length
    # A difference: the sum of offset and size may need more than 64 bits.
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


_SMALLEST_BUFFER: Final = 1 << 20
_NO_KEY: Final = -1
_READERS: Final = 8
"""The most threads that copy ciphertext: more do not read a host's memory any faster."""
_ITEM_SIZES: Final = (1, 2, 4, 8)


class Opened(NamedTuple):
    """A batch after the device has opened it."""

    plain: torch.Tensor
    rows: torch.Tensor
    """The plan's rows, in the device's memory."""
    failed: int
    """The index of a chunk that is not authentic, or NO_FAILURE."""


class Slot(Protocol):
    """The memory of one batch under way."""

    def room(self, size: int) -> memoryview:
        """Host memory that the ciphertext is read into."""

    def start(self, plan: Plan) -> None:
        """Begins to open the ciphertext in the room. May return before it is opened."""

    def finish(self) -> Opened:
        """Waits until the batch is opened, and returns it. Any thread may call this."""


class Opener(Protocol):
    """A device that opens batches."""

    def working(self) -> AbstractContextManager[None]:
        """The context in which one thread makes and starts slots. At its end all work is done."""

    def slot(self) -> Slot: ...

    def give(self, plain: torch.Tensor, rows: torch.Tensor) -> None:
        """Called by the thread that will compute with these tensors, before it does."""

    def take(
        self, plain: torch.Tensor, rows: torch.Tensor, length: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """A new tensor of these rows, with `length` numbers in each."""

    def close(self) -> None:
        """Overwrites the keys. The caller makes sure that no slot is in use."""


class _Streams(NamedTuple):
    copies: torch.cuda.Stream
    opens: torch.cuda.Stream
    checks: torch.cuda.Stream
    """A stream of its own, so that a check does not wait for later batches."""


class CudaSlot:
    """A slot of pinned host memory, and the GPU memory that it is copied to."""

    def __init__(self, opener: CudaOpener) -> None:
        self._opener, self._streams = opener, opener.streams
        self.pinned = torch.empty(0, dtype=torch.uint8)
        self.sealed = torch.empty(0, dtype=torch.uint8)
        # Allocated in the stream that uses it: in another stream, an earlier user of this memory
        # could still write to it.
        with torch.cuda.stream(self._streams.opens):
            self.failed = torch.full((1,), NO_FAILURE, dtype=torch.int64, device=opener.device)
        self.plain = self.failed
        self._listed = self._nothing = Listed(self.failed, self.failed)
        self._opened = new_event()

    def room(self, size: int) -> memoryview:
        if self.pinned.nbytes < size:
            room = max(_SMALLEST_BUFFER, 1 << (size - 1).bit_length())
            self.pinned = torch.empty(room, dtype=torch.uint8, pin_memory=True)
            with torch.cuda.stream(self._streams.copies):
                self.sealed = torch.empty(room, dtype=torch.uint8, device=self._opener.device)
        return self.pinned.numpy().data

    def start(self, plan: Plan) -> None:
        size, opens = plan.sealed_bytes, self._streams.opens
        with torch.cuda.stream(self._streams.copies):
            self.sealed[:size].copy_(self.pinned[:size], non_blocking=True)
        opens.wait_stream(self._streams.copies)
        with torch.cuda.stream(opens):
            self.failed.fill_(NO_FAILURE)
            self.plain = torch.empty(
                plan.plain_bytes, dtype=torch.uint8, device=self._opener.device
            )
            self._listed = self._opener.open(plan, self)
            self._opened.record(opens)

    def finish(self) -> Opened:
        self._opened.synchronize()
        with torch.cuda.stream(self._streams.checks):
            failed = int(self.failed.item())
        made = Opened(self.plain, self._listed.rows, failed)
        self.plain, self._listed = self.failed, self._nothing
        return made


class CudaOpener:
    """A GPU with the keys of the files that batches have needed so far."""

    def __init__(self, device: torch.device | str, files: SealedParts) -> None:
        self.device = torch.device(device)
        if self.device.index is None:  # the working thread may have another current device
            self.device = torch.device(self.device.type, torch.cuda.current_device())
        self._kernels = ChunkKernels(self.device, len(files))
        # Shared by all iterations: torch reuses freed GPU memory only in the stream that used it.
        self.streams = _Streams(*(new_stream(self.device) for _ in range(3)))
        self._entries = np.full(len(files), _NO_KEY, dtype=np.int64)
        """The index of each file's key in the GPU's memory, or _NO_KEY."""

    @contextmanager
    def working(self) -> Iterator[None]:
        with torch.cuda.device(self.device):
            try:
                yield
            finally:
                for stream in self.streams:
                    stream.synchronize()  # nothing under way uses what is freed now

    def slot(self) -> CudaSlot:
        return CudaSlot(self)

    def open(self, plan: Plan, slot: CudaSlot) -> Listed:
        """Opens a slot's chunks on the current stream."""
        for file, part in plan.files.items():
            if self._entries[file] == _NO_KEY:
                self._entries[file] = self._kernels.add(part.reader)
        listed = plan.chunks.copy()
        listed["file"] = self._entries[plan.chunks["file"]]
        return self._kernels.open(slot.sealed, listed, slot.plain, slot.failed, plan.rows)

    def give(self, plain: torch.Tensor, rows: torch.Tensor) -> None:
        # The tensors were made on other streams: torch must not reuse their memory before the
        # current stream is done with it.
        stream = torch.cuda.current_stream(self.device)
        plain.record_stream(stream)
        rows.record_stream(stream)

    def take(
        self, plain: torch.Tensor, rows: torch.Tensor, length: int, dtype: torch.dtype
    ) -> torch.Tensor:
        self.give(plain, rows)  # the current stream may differ from the one of an earlier `give`
        return self._kernels.take(plain, rows, length, dtype)

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self._kernels.wipe()


@dataclass(frozen=True, slots=True)
class Batch:
    """Opened samples in the GPU's memory."""

    plain: torch.Tensor
    samples: NDArray[np.void]
    table: NDArray[np.void]
    """The plan's rows: where each sample is in `plain`."""
    on_device: torch.Tensor
    """The same table in the GPU's memory."""
    opener: Opener

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        start = int(self.table["from"][index])
        return self.plain[start : start + int(self.table["bytes"][index])]

    def part(self, first: int, end: int) -> Batch:
        samples, table = self.samples[first:end], self.table[first:end]
        return Batch(self.plain, samples, table, self.on_device[first:end], self.opener)

    def give(self) -> None:
        """Called by the thread that will compute with the batch, before it does."""
        self.opener.give(self.plain, self.on_device)

    def rows(self, dtype: torch.dtype) -> torch.Tensor:
        """The samples' bytes as the rows of one tensor. All samples must have the same length."""
        if bool((self.table["item"] != 1).any()):
            raise ConfigurationError("samples of numbers (item=) do not form rows of bytes: take()")
        widths = np.unique(self.table["bytes"]).tolist()
        if len(widths) != 1:
            raise ConfigurationError("samples of different lengths do not form rows: take each")
        if widths[0] % dtype.itemsize:
            raise ConfigurationError(f"samples of {widths[0]} bytes do not hold whole {dtype}")
        return self.take(widths[0], torch.uint8).view(dtype)

    def take(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor with one row of `length` numbers for each sample (see `Sample.item`).

        A shorter sample is filled up with its `pad`; a longer one is cut.
        """
        if dtype.itemsize not in _ITEM_SIZES:
            raise Unsupported(f"a GPU makes numbers of 1, 2, 4 or 8 bytes, and not {dtype}")
        return self.opener.take(self.plain, self.on_device, length, dtype)


@dataclass(slots=True)
class Seconds:
    """Where the time of the iterations went, in seconds.

    `order` to `start` count in the thread that reads ahead, `ready` and `finish` in the thread
    that takes the batches.
    """

    order: float = 0.0
    """To get the next batch's samples from the caller's iterable."""
    plan: float = 0.0
    """To find the chunks that hold the samples."""
    room: float = 0.0
    """Waited for the memory of a batch that was not taken yet."""
    read: float = 0.0
    """To read the chunks into pinned memory."""
    start: float = 0.0
    """To give the chunks and their list to the GPU."""
    ready: float = 0.0
    """Waited for the thread that reads ahead."""
    finish: float = 0.0
    """Waited for the GPU to open and check the batch."""


Step = Literal["order", "plan", "room", "read", "start", "ready", "finish"]


class _Clock:
    """Adds the time since the last mark to a step. Each thread has its own clock and steps."""

    def __init__(self, seconds: Seconds) -> None:
        self._seconds = seconds
        self._last = time.perf_counter()

    def restart(self) -> None:
        self._last = time.perf_counter()

    def mark(self, step: Step) -> None:
        now = time.perf_counter()
        setattr(self._seconds, step, getattr(self._seconds, step) + now - self._last)
        self._last = now


class Iteration:
    """One pass over batches: one thread starts them, and another thread takes them."""

    def __init__(self) -> None:
        self.started: queue.SimpleQueue[tuple[Slot, Plan] | BaseException | None] = (
            queue.SimpleQueue()
        )
        self.free: queue.SimpleQueue[Slot | None] = queue.SimpleQueue()
        self.stopped = threading.Event()
        self.process = os.getpid()
        self._thread: threading.Thread | None = None

    def start(self, run: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=run, name="sealring-batches", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and waits for it. Batches that were not taken are dropped.

        A garbage collection in that thread may call this. It then does not wait for itself.
        """
        self.stopped.set()
        self.free.put(None)  # the thread may be waiting for a free slot
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with contextlib.suppress(queue.Empty):
            while True:
                self.started.get_nowait()
        self.started.put(None)  # another thread may be waiting for the next batch


class GpuBatches(Closable):
    """Opens batches on a device. Up to `ahead` batches are opened before they are asked for."""

    _what, _instead = "the loader", "make a new one"

    def __init__(self, opener: Opener, files: SealedParts, *, ahead: int = 2) -> None:
        if ahead < 1:
            raise ConfigurationError("at least one batch must be under way: ahead=1 or more")
        self._opener = opener
        self._files = files
        self._ahead = ahead
        self._threads = min(_READERS, len(os.sched_getaffinity(0)))
        self.current: Iteration | None = None
        self.seconds = Seconds()
        """The times of all iterations together."""

    def opened(self, batches: Iterable[Samples]) -> Generator[Batch]:
        """Yields the opened batches in order; a batch's error is raised in its place.

        The thread that reads ahead iterates over `batches`. The next call ends this iteration.
        """
        self.require_open()
        self.stop()
        current = self.current = Iteration()
        current.start(lambda: self._run(current, batches))
        clock = _Clock(self.seconds)
        try:
            while True:
                self.require_current(current)
                clock.restart()
                came = current.started.get()
                clock.mark("ready")
                self.require_current(current)
                if came is None:
                    return
                if isinstance(came, BaseException):
                    raise came
                batch = self._finished(*came)
                current.free.put(came[0])
                clock.mark("finish")
                self.require_current(current)
                batch.give()
                yield batch
        finally:
            current.stop()

    def _finished(self, slot: Slot, plan: Plan) -> Batch:
        """Returns the batch if all its chunks are authentic; else raises TamperedChunk."""
        plain, on_device, failed = slot.finish()
        if failed != NO_FAILURE:
            chunk = plan.chunks[failed]
            raise TamperedChunk(
                f"chunk {int(chunk['number'])} of {plan.files[int(chunk['file'])].name} is not "
                "what was sealed there: it was changed. Restore the file from a copy"
            )
        return Batch(plain, plan.samples, plan.rows, on_device, self._opener)

    def require_current(self, iteration: Iteration | None) -> None:
        self.require_open()
        if iteration is not None and iteration.process != os.getpid():
            raise ForkedProcess(
                "this process was forked from the one that reads the batches: a GPU's batches are "
                "taken in the process that made the loader"
            )
        if iteration is None or iteration.stopped.is_set():
            raise AlreadyClosed(
                "this iteration was ended by a later one of the same loader, or by a state that "
                "was loaded: iterate over the loader again"
            )

    def stop(self) -> None:
        """Ends the current iteration, if there is one."""
        if self.current is not None:
            self.current.stop()
        self.current = None

    def _release(self) -> None:
        """Stops the iteration and overwrites the keys in the device's memory."""
        self.stop()
        self._opener.close()

    def plan(self, samples: Samples) -> Plan:
        return plan_of(samples, self._files)

    def read(self, plan: Plan, memory: memoryview) -> None:
        """Reads the plan's ciphertext in one native call without Python's lock.

        The caller's thread may hold that lock for long.
        """
        readers = [part.reader for part in plan.files.values()]
        _native.copy_sealed(readers, plan.reads.view(np.uint8).data, memory, self._threads)

    # ---- in the thread

    def _run(self, current: Iteration, batches: Iterable[Samples]) -> None:
        try:
            with self._opener.working():
                self._start_all(current, batches)
            current.started.put(None)
        except BaseException as problem:
            current.started.put(problem)

    def _start_all(self, current: Iteration, batches: Iterable[Samples]) -> None:
        # One slot more than `ahead`, so that one can be filled from the disk meanwhile.
        for _ in range(self._ahead + 1):
            current.free.put(self._opener.slot())
        clock = _Clock(self.seconds)
        for samples in batches:
            clock.mark("order")
            plan = self.plan(samples)
            clock.mark("plan")
            slot = current.free.get()
            clock.mark("room")
            if slot is None or current.stopped.is_set():
                return
            self.read(plan, slot.room(plan.sealed_bytes))
            clock.mark("read")
            slot.start(plan)
            current.started.put((slot, plan))
            clock.mark("start")
