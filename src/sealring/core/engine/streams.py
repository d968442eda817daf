"""Streams of a GPU, and how they wait for an operation in place of the host.

A collective's kernels are launched ahead, in a stream of the group, when the call is queued. From
then on the group's thread makes no call to CUDA. The end of that stream's work is the end of the
call: every record checked, the last byte written. Messages come in no order that ranks share, so
one persistent kernel runs them. Either way streams wait for the operation's number
(native/device/command_queue.hpp), as they do with NCCL.

An operation that fails completes too, or the GPU would never go on. No caller waits then, so its
error is deferred (group/deferred_errors.py), and its results are first overwritten with ones, which
are NaN in every float type.

Tests have streams of their own, made of threads, which need no GPU.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import torch

from sealring import _native
from sealring.errors import Unsupported

Devices: TypeAlias = list[int | str | torch.device]
"""What a future is bound to."""


# ---- torch's streams and events, which have no types of their own


def new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call,no-any-return,unused-ignore]


def new_event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call,no-any-return,unused-ignore]


def reached(event: torch.cuda.Event) -> bool:
    """Whether everything before it is done."""
    return bool(event.query())  # type: ignore[no-untyped-call,unused-ignore]


def require_no_capture(device: torch.device, what: str) -> None:
    """Raises Unsupported while the current stream's work becomes a CUDA graph.

    A replay repeats kernels with the arguments of the capture, so it would use nonces again, and it
    repeats nothing that the host or another rank does.
    """
    if _is_captured(device):
        raise Unsupported(
            f"{what} cannot be part of a CUDA graph: a replay would repeat the GPU's part of it "
            "alone. Call it outside of torch.cuda.graph() and make_graphed_callables(); compile "
            'functional collectives without mode="reduce-overhead" and mode="max-autotune"'
        )


def _is_captured(device: torch.device) -> bool:
    if torch.cuda.current_device() == device.index:  # which spares most calls the guard
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


@contextmanager
def synchronized(stream: torch.cuda.Stream) -> Iterator[None]:
    """Makes the stream the current one; the end waits for the GPU."""
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


# ---- the streams of one GPU


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
        self._side = new_stream(device)
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

    def side_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._side)

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


# ---- who waits


@dataclass(slots=True)
class StreamCaller:
    """The caller of a collective that streams are to wait for."""

    streams: Streams
    copy_back: Callable[[], None] | None = None
    """Copies the result to where the user wants it, on the current stream."""


@dataclass(slots=True)
class StreamWait:
    """What a stream waits for in place of the host."""

    streams: Streams
    operation: _native.Completion
    in_order: bool = False
    """Operations of these streams complete in the order in which they were submitted."""
    awaited: bool = False
    """A stream waits for it, so the script takes the operation for done."""

    def begin(self) -> None:
        """Later work of the current stream waits for the operation."""
        self.awaited = True
        self.streams.make_stream_wait(self.operation)


def last_of_each(waits: Iterable[StreamWait]) -> tuple[StreamWait, ...]:
    """Those that are not done whenever a later one is."""
    kept = {id(wait.streams if wait.in_order else wait): wait for wait in waits}
    return tuple(kept.values())


def future_of(waits: tuple[StreamWait, ...], result: Any) -> torch.futures.Future[Any]:
    """A future that is done: the stream that takes its value waits; the host does not."""
    streams = waits[0].streams
    future: torch.futures.Future[Any] = torch.futures.Future(devices=streams.devices)
    with streams.side_stream():
        for wait in waits:
            wait.begin()
        future.set_result(result)
    return future


class _DriverCalls:
    """Calls under way, of all groups of this process, for which a thread must call CUDA.

    While a stream waits, such a thread may block until the stream goes on. A peer may need its call
    before it comes to what the stream waits for. So while there is one, hosts wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def begin(self) -> None:
        with self._lock:
            self._count += 1

    def end(self) -> None:
        with self._lock:
            self._count -= 1

    def track(
        self,
        when_done: Callable[[Callable[[], None]], None],
        queue: Callable[[], None] = lambda: None,
    ) -> None:
        """Counts a call from before it is queued until it is done."""
        self.begin()
        try:
            queue()
        except BaseException:
            self.end()
            raise
        when_done(self.end)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts what is done within it, whichever thread does it."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    @property
    def any(self) -> bool:
        return self._count > 0


driver_calls: Final = _DriverCalls()
