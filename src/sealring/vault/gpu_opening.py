"""What a GPU does for batches: copies ciphertext into its memory, authenticates and opens it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch

from sealring.core.engine.cuda.chunks import NO_FAILURE, ChunkKernels, Listed
from sealring.core.engine.streams import new_event, new_stream
from sealring.vault.gpu_plan import Plan, SealedParts

_SMALLEST_BUFFER: Final = 1 << 20
_NO_KEY: Final = -1


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
