"""Batches that travel from the disk to a GPU as ciphertext, and are opened there.

The CPU decrypts nothing: it reads the chunks that hold the wanted samples into pinned memory, the
GPU copies them into its own memory, authenticates and opens them there. A thread does this for the
next batches while the current one is computed with.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from sealring.engine.cuda.chunks import NO_FAILURE
from sealring.errors import AlreadyClosed, ConfigurationError, TamperedChunk
from sealring.vault.closing import Closable
from sealring.vault.gpu_opening import Opener, Slot
from sealring.vault.gpu_plan import Plan, Read, Samples, SealedParts, plan_of

_PIECE_BYTES: Final = 4 << 20
_READERS: Final = 4


@dataclass(frozen=True, slots=True)
class Batch:
    """Opened samples in the GPU's memory."""

    plain: torch.Tensor
    starts: NDArray[np.int64]
    """Where each sample begins in `plain`."""
    samples: NDArray[np.void]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        start = int(self.starts[index])
        return self.plain[start : start + int(self.samples["bytes"][index])]

    def part(self, first: int, end: int) -> Batch:
        return Batch(self.plain, self.starts[first:end], self.samples[first:end])

    def rows(self, dtype: torch.dtype) -> torch.Tensor:
        """All samples as the rows of one tensor. They have the same length."""
        widths = np.unique(self.samples["bytes"]).tolist()
        if len(widths) != 1:
            raise ConfigurationError("samples of different lengths do not form rows: take each")
        if widths[0] % dtype.itemsize:
            raise ConfigurationError(f"samples of {widths[0]} bytes do not hold whole {dtype}")
        return torch.stack([self[index] for index in range(len(self))]).view(dtype)


class Iteration:
    """Batches from one start on: a thread opens them, another one takes them."""

    def __init__(self, ahead: int) -> None:
        self.ready: queue.Queue[Batch | BaseException | None] = queue.Queue(ahead)
        self.stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, run: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=run, name="sealring-batches", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended. Batches that were not taken are dropped."""
        self.stopped.set()
        while self._thread is not None and self._thread.is_alive():
            self._empty()  # it may wait for room in the queue
            self._thread.join(0.01)
        self._empty()
        self.ready.put(None)  # a thread may wait for the next batch

    def _empty(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self.ready.get_nowait()


class GpuBatches(Closable):
    """Opens batches on a device, `ahead` of them before they are asked for."""

    _instead = "make a new one"

    def __init__(self, opener: Opener, files: SealedParts, *, ahead: int = 2) -> None:
        if ahead < 1:
            raise ConfigurationError("at least one batch must be under way: ahead=1 or more")
        self._opener = opener
        self._files = files
        self._ahead = ahead
        self.current: Iteration | None = None

    def opened(self, batches: Iterable[Samples]) -> Generator[Batch]:
        """The batches in their order, and an error of a batch in its place.

        `batches` is iterated by the thread that reads ahead. The next call ends this iteration.
        """
        self.require_open()
        self.stop()
        current = self.current = Iteration(self._ahead)
        current.start(lambda: self._run(current, batches))
        try:
            while True:
                self.require_current(current)
                batch = current.ready.get()
                self.require_current(current)
                if batch is None:
                    return
                if isinstance(batch, BaseException):
                    raise batch
                self._opener.give(batch.plain)
                yield batch
        finally:
            current.stop()

    def require_current(self, iteration: Iteration | None) -> None:
        self.require_open()
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

    def _what(self) -> str:
        return "the loader"

    def plan(self, samples: Samples) -> Plan:
        return plan_of(samples, self._files)

    # ---- in the thread

    def _run(self, current: Iteration, batches: Iterable[Samples]) -> None:
        try:
            with self._opener.working(), ThreadPoolExecutor(_READERS, "sealring-read") as readers:
                self._open_all(current, batches, readers)
            current.ready.put(None)
        except BaseException as problem:
            current.ready.put(problem)

    def _open_all(
        self,
        current: Iteration,
        batches: Iterable[Samples],
        readers: ThreadPoolExecutor,
    ) -> None:
        # One more than are under way, so that one can be filled from the disk meanwhile.
        free = deque(self._opener.slot() for _ in range(self._ahead + 1))
        started = self._started(batches, free, readers)
        under_way: deque[tuple[Slot, Plan]] = deque()
        failure: BaseException | None = None
        while not current.stopped.is_set():
            try:
                under_way.append(next(started))
            except StopIteration:
                break
            except BaseException as problem:
                failure = problem  # the batches before it come first
                break
            if len(under_way) > self._ahead:
                self._hand_over(current, under_way, free)
        while under_way and not current.stopped.is_set():
            self._hand_over(current, under_way, free)
        if failure is not None:
            raise failure

    def _started(
        self,
        batches: Iterable[Samples],
        free: deque[Slot],
        readers: ThreadPoolExecutor,
    ) -> Iterator[tuple[Slot, Plan]]:
        for samples in batches:
            slot, plan = free.popleft(), self.plan(samples)
            self._read(plan, slot.room(plan.sealed_bytes), readers)
            slot.start(plan)
            yield slot, plan

    def _hand_over(
        self, current: Iteration, under_way: deque[tuple[Slot, Plan]], free: deque[Slot]
    ) -> None:
        slot, plan = under_way.popleft()
        plain, failed = slot.finish()
        if failed != NO_FAILURE:
            chunk = plan.chunks[failed]
            raise TamperedChunk(
                f"chunk {int(chunk['number'])} of {self._files[int(chunk['file'])].name} is not "
                "what was sealed there: it was changed. Restore the file from a copy"
            )
        free.append(slot)
        current.ready.put(Batch(plain, plan.starts, plan.samples))

    def _read(self, plan: Plan, memory: memoryview, readers: ThreadPoolExecutor) -> None:
        """By several threads: one alone copies from the page cache slower than the GPU takes it."""
        pieces = [
            Read(one.file, one.offset + at, min(_PIECE_BYTES, one.bytes - at), one.to + at)
            for one in plan.reads
            for at in range(0, one.bytes, _PIECE_BYTES)
        ]
        parts = {one.file: self._files[one.file] for one in plan.reads}

        def read(piece: Read) -> None:
            into = memory[piece.to : piece.to + piece.bytes]
            parts[piece.file].read_into(piece.offset, into)

        if len(pieces) == 1:
            read(pieces[0])
        else:
            list(readers.map(read, pieces))
