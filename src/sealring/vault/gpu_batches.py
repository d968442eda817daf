"""Batches that travel from the disk to a GPU as ciphertext, and are opened there.

The CPU decrypts nothing: it reads the chunks that hold the wanted samples into pinned memory, the
GPU copies them into its own memory, authenticates and opens them there. A thread does this for the
next batches while the current one is computed with.
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


_SMALLEST_BUFFER: Final = 1 << 20
_NO_KEY: Final = -1
_READERS: Final = 8
"""Threads that copy ciphertext, at most: more than this do not make a host's memory faster."""
_ITEM_SIZES: Final = (1, 2, 4, 8)


class Opened(NamedTuple):
    """What a device has made of a batch."""

    plain: torch.Tensor
    rows: torch.Tensor
    """The plan's rows, in the device's memory."""
    failed: int
    """The place of a chunk that is not authentic, or NO_FAILURE."""


class Slot(Protocol):
    """The memory of one batch under way."""

    def room(self, size: int) -> memoryview:
        """Host memory that the ciphertext is read into."""

    def start(self, plan: Plan) -> None:
        """Begins to open what lies in the room. It may return before that is done."""

    def finish(self) -> Opened:
        """Waits until it is opened. Any thread may call it."""


class Opener(Protocol):
    """A device that opens batches."""

    def working(self) -> AbstractContextManager[None]:
        """In the one thread that makes slots and starts them. At its end nothing is under way."""

    def slot(self) -> Slot: ...

    def give(self, plain: torch.Tensor, rows: torch.Tensor) -> None:
        """Called by the thread that will compute with these, before it does."""

    def take(
        self, plain: torch.Tensor, rows: torch.Tensor, length: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """A new tensor of these rows, `length` numbers each."""

    def close(self) -> None:
        """Overwrites the keys. No slot is in use."""


class _Streams(NamedTuple):
    copies: torch.cuda.Stream
    opens: torch.cuda.Stream
    checks: torch.cuda.Stream
    """Its own, so that a check does not wait for the batches behind."""


class CudaSlot:
    """Pinned memory, and the GPU's memory that it is copied to."""

    def __init__(self, opener: CudaOpener) -> None:
        self._opener, self._streams = opener, opener.streams
        self.pinned = torch.empty(0, dtype=torch.uint8)
        self.sealed = torch.empty(0, dtype=torch.uint8)
        # In the stream that uses it: in another one, what is there before could still be written.
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
    """A GPU, with the keys of those of the files that batches have needed."""

    def __init__(self, device: torch.device | str, files: SealedParts) -> None:
        self.device = torch.device(device)
        if self.device.index is None:  # the current one of the thread that works is another
            self.device = torch.device(self.device.type, torch.cuda.current_device())
        self._kernels = ChunkKernels(self.device, len(files))
        # Of all iterations: torch keeps freed memory of the GPU for the stream that it was used in.
        self.streams = _Streams(*(new_stream(self.device) for _ in range(3)))
        self._entries = np.full(len(files), _NO_KEY, dtype=np.int64)
        """The place of each file's key in the GPU's memory."""

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
        """On the current stream."""
        for file, part in plan.files.items():
            if self._entries[file] == _NO_KEY:
                self._entries[file] = self._kernels.add(part.reader)
        listed = plan.chunks.copy()
        listed["file"] = self._entries[plan.chunks["file"]]
        return self._kernels.open(slot.sealed, listed, slot.plain, slot.failed, plan.rows)

    def give(self, plain: torch.Tensor, rows: torch.Tensor) -> None:
        # They were made on other streams: they are not given back before this one is done.
        stream = torch.cuda.current_stream(self.device)
        plain.record_stream(stream)
        rows.record_stream(stream)

    def take(
        self, plain: torch.Tensor, rows: torch.Tensor, length: int, dtype: torch.dtype
    ) -> torch.Tensor:
        self.give(plain, rows)  # the current stream may be another than that of the batch before
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
    """Where each sample is in `plain`, as a plan says it."""
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
        """Called by the thread that will compute with it, before it does."""
        self.opener.give(self.plain, self.on_device)

    def rows(self, dtype: torch.dtype) -> torch.Tensor:
        """All samples' bytes as the rows of one tensor. They have the same length."""
        if bool((self.table["item"] != 1).any()):
            raise ConfigurationError("samples of numbers (item=) do not form rows of bytes: take()")
        widths = np.unique(self.table["bytes"]).tolist()
        if len(widths) != 1:
            raise ConfigurationError("samples of different lengths do not form rows: take each")
        if widths[0] % dtype.itemsize:
            raise ConfigurationError(f"samples of {widths[0]} bytes do not hold whole {dtype}")
        return self.take(widths[0], torch.uint8).view(dtype)

    def take(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """The samples' numbers (`Sample.item`), `length` in each row, filled up with their pad.

        Of a sample that has more, the first ones.
        """
        if dtype.itemsize not in _ITEM_SIZES:
            raise Unsupported(f"a GPU makes numbers of 1, 2, 4 or 8 bytes, and not {dtype}")
        return self.opener.take(self.plain, self.on_device, length, dtype)


@dataclass(slots=True)
class Seconds:
    """Where the time of an iteration went, in seconds of the clock."""

    order: float = 0.0
    """Of the thread that reads ahead: which samples come next."""
    plan: float = 0.0
    """Which chunks hold them."""
    room: float = 0.0
    """It waited for the memory of a batch that was not taken yet."""
    read: float = 0.0
    start: float = 0.0
    """It gave the GPU the chunks, and a list of them."""
    ready: float = 0.0
    """Of the thread that takes the batches: it waited for the one that reads ahead."""
    finish: float = 0.0
    """It waited for the GPU, and for what the GPU has found."""


Step = Literal["order", "plan", "room", "read", "start", "ready", "finish"]


class _Clock:
    """Adds the time since the last mark to a step. Each thread has a clock and steps of its own."""

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
    """Batches from one start on: a thread starts them, another one takes them."""

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
        """Returns when the thread has ended. Batches that were not taken are dropped.

        A garbage collection in the thread itself may call it: the thread then ends by itself.
        """
        self.stopped.set()
        self.free.put(None)  # it may wait for room
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with contextlib.suppress(queue.Empty):
            while True:
                self.started.get_nowait()
        self.started.put(None)  # a thread may wait for the next batch


class GpuBatches(Closable):
    """Opens batches on a device, `ahead` of them before they are asked for."""

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
        """Of all iterations."""

    def opened(self, batches: Iterable[Samples]) -> Generator[Batch]:
        """The batches in their order, and an error of a batch in its place.

        `batches` is iterated by the thread that reads ahead. The next call ends this iteration.
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
        """The batch, after the check of all its chunks."""
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
        """Ends the iteration that is under way."""
        if self.current is not None:
            self.current.stop()
        self.current = None

    def _release(self) -> None:
        """Overwrites the keys in the device's memory too."""
        self.stop()
        self._opener.close()

    def plan(self, samples: Samples) -> Plan:
        return plan_of(samples, self._files)

    def read(self, plan: Plan, memory: memoryview) -> None:
        """In one call without the interpreter, whose lock the caller's thread may hold for long."""
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
        # One more than are under way, so that one can be filled from the disk meanwhile.
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
