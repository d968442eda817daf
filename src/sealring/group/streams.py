"""Streams, as completions use them (completions.py), and CUDA's.

Tests have streams of their own, made of threads, which need no GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeAlias

import torch

from sealring.engine.collective import Collective
from sealring.engine.engine import CollectiveEngine
from sealring.engine.mailbox import Mailbox

Devices: TypeAlias = list[int | str | torch.device]
"""What a future is bound to."""


class Streams(Protocol):
    """The streams of one group's collectives on one GPU."""

    @property
    def devices(self) -> Devices: ...

    def prelaunch(self, collective: Collective) -> Collective | None:
        """Launches as many of its kernels as can wait there; returns what the engine is to run.

        None where it needs too many.
        """

    def launch_rest(self, copy_back: Callable[[], None] | None) -> Any:
        """Launches the rest, and `copy_back` after it; returns the end, which streams wait for.

        Called when the collective is queued. It may block until some of the kernels have run.
        """

    def make_stream_wait(self, end: Any) -> None:
        """Later work of the calling thread's current stream waits for it."""

    def is_done(self, end: Any) -> bool: ...

    def waiting_stream(self, end: Any) -> AbstractContextManager[Any]:
        """Within it the current stream is a stream that waits for the end."""

    def free_later(self, kept: object) -> None:
        """What was kept for a call may be freed, but not on the group's thread.

        To free memory that several streams have used, torch calls CUDA.
        """


class MessageStreams(Protocol):
    """The streams of one group's messages on one GPU. Messages are known by number."""

    @property
    def devices(self) -> Devices: ...

    def make_stream_wait(self, number: int) -> None:
        """Later work of the calling thread's current stream waits for the message."""

    def is_done(self, number: int) -> bool: ...

    def side_stream(self) -> AbstractContextManager[Any]:
        """Within it the current stream is another one, which nothing else uses."""


class CudaStreams:
    def __init__(self, engine: CollectiveEngine, device: torch.device) -> None:
        self._engine = engine
        self._device = device
        self._kernels = torch.cuda.ExternalStream(engine.prelaunch_stream, device)  # type: ignore[no-untyped-call]
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._kept: deque[object] = deque()

    @property
    def devices(self) -> Devices:
        return [self._device]

    def prelaunch(self, collective: Collective) -> Collective | None:
        self._free_old()
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream(self._device)
            return self._engine.prelaunch(collective, stream.cuda_stream)

    def launch_rest(self, copy_back: Callable[[], None] | None) -> int:
        with torch.cuda.stream(self._kernels):  # its device is the current one, too
            self._engine.launch_rest()
            try:
                if copy_back is not None:
                    copy_back()
            finally:
                end = self._engine.mark_end()
            return end

    def is_done(self, end: int) -> bool:
        return self._engine.is_done(end)

    def make_stream_wait(self, end: int) -> None:
        self._free_old()
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream(self._device)
            self._engine.make_stream_wait(stream.cuda_stream, end)

    @contextmanager
    def waiting_stream(self, end: int) -> Iterator[None]:
        with torch.cuda.stream(self._side):
            self.make_stream_wait(end)
            yield

    def free_later(self, kept: object) -> None:
        self._kept.append(kept)

    def _free_old(self) -> None:
        """All but the newest, which the group's thread may still use."""
        while len(self._kept) > 1:
            self._kept.popleft()

    def close(self) -> None:
        """The group's thread has ended."""
        self._kept.clear()

    def also_used_by(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Tells torch's allocator that the kernels' stream uses the tensors after the call."""
        for tensor in tensors:
            tensor.record_stream(self._kernels)


class CudaMessageStreams:
    def __init__(self, mailbox: Mailbox, device: torch.device) -> None:
        self._mailbox = mailbox
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def devices(self) -> Devices:
        return [self._device]

    def make_stream_wait(self, number: int) -> None:
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream(self._device)
            self._mailbox.make_stream_wait(stream.cuda_stream, number)

    def is_done(self, number: int) -> bool:
        return self._mailbox.is_done(number)

    def side_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._side)
