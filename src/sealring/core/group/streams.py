"""Streams, as completions use them (completions.py): CUDA's.

Tests have streams of their own, made of threads, which need no GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeAlias

import torch

from sealring import _native
from sealring.core.engine.cuda.streams import require_no_capture

Devices: TypeAlias = list[int | str | torch.device]
"""What a future is bound to."""


class Streams(Protocol):
    """The streams of one GPU. A stream is known by its handle."""

    @property
    def devices(self) -> Devices: ...

    def guard(self) -> AbstractContextManager[Any]:
        """Within it the calling thread may call CUDA for this GPU."""

    @property
    def current(self) -> int: ...

    def make_stream_wait(self, operation: _native.Completion) -> None:
        """Later work of the calling thread's current stream waits for it."""

    def side_stream(self) -> AbstractContextManager[Any]:
        """Within it the current stream is another one, which nothing else uses."""

    def run_on(self, stream: int, task: Callable[[], None]) -> None:
        """The work of `task` runs on this stream."""

    def used_on(self, stream: int, tensors: tuple[torch.Tensor, ...]) -> None:
        """This stream uses the tensors after the call."""

    def free_later(self, kept: object) -> None:
        """What was kept for a call may be freed, but not on the group's thread.

        To free memory that several streams have used, torch calls CUDA.
        """

    def free_old(self) -> None:
        """Frees all but the newest of it, which the group's thread may still use."""


class CudaStreams:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._kept: deque[object] = deque()

    @property
    def devices(self) -> Devices:
        return [self._device]

    def guard(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self._device)

    @property
    def current(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream

    def make_stream_wait(self, operation: _native.Completion) -> None:
        self.free_old()
        require_no_capture(self._device, "waiting for a sealed call")
        with self.guard():
            operation.wait_on_stream(self.current)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        with torch.cuda.stream(self._side):
            yield

    def run_on(self, stream: int, task: Callable[[], None]) -> None:
        with torch.cuda.stream(self._external(stream)):
            task()

    def used_on(self, stream: int, tensors: tuple[torch.Tensor, ...]) -> None:
        external = self._external(stream)
        for tensor in tensors:
            tensor.record_stream(external)

    def _external(self, stream: int) -> torch.cuda.Stream:
        return torch.cuda.ExternalStream(stream, self._device)  # type: ignore[no-untyped-call]

    def free_later(self, kept: object) -> None:
        self._kept.append(kept)

    def free_old(self) -> None:
        while len(self._kept) > 1:
            self._kept.popleft()

    def close(self) -> None:
        """The group's thread has ended."""
        self._kept.clear()
