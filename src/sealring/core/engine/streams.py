"""Streams of a GPU, and how a stream waits for an operation while the host goes on.

The kernels of a collective are launched ahead, in a stream of the group, when the call is queued.
After that the group's thread makes no call to CUDA. The call ends when that stream's work ends:
every record is checked and the last byte is written. Messages have no order that all ranks share,
so one persistent kernel runs them. In both cases streams wait for the operation's number
(native/device/command_queue.hpp), as they do with NCCL.

An operation that fails must complete, too, or the GPU would wait for ever. No caller waits for it,
so its error is deferred (group/deferred_errors.py). Before it completes, its results are
overwritten with bytes of all ones, which are NaN in every float type.

Tests use another implementation of `Streams`, which is made of threads and needs no GPU.
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
"""The devices that a future is bound to."""


# ---- torch's streams and events, which have no types of their own


def new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call,no-any-return,unused-ignore]


def new_event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call,no-any-return,unused-ignore]


def reached(event: torch.cuda.Event) -> bool:
    """Whether all work before the event is done."""
    return bool(event.query())  # type: ignore[no-untyped-call,unused-ignore]


def require_no_capture(device: torch.device, what: str) -> None:
    """Raises Unsupported while the current stream is captured into a CUDA graph.

    A replay would run the kernels again with the captured arguments, and so use nonces twice. It
    would not repeat what the host and other ranks do.
    """
    if _is_captured(device):
        raise Unsupported(
            f"{what} cannot be part of a CUDA graph: a replay would repeat the GPU's part of it "
            "alone. Call it outside of torch.cuda.graph() and make_graphed_callables(); compile "
            'functional collectives without mode="reduce-overhead" and mode="max-autotune"'
        )


def _is_captured(device: torch.device) -> bool:
    if torch.cuda.current_device() == device.index:  # saves most calls the device guard
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


@contextmanager
def synchronized(stream: torch.cuda.Stream) -> Iterator[None]:
    """Makes `stream` the current stream; on exit waits until the GPU has done its work."""
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


# ---- the streams of one GPU


class Streams(Protocol):
    """The streams of one GPU, each identified by its handle."""

    @property
    def devices(self) -> Devices: ...

    def guard(self) -> AbstractContextManager[Any]:
        """Makes this GPU the current device of the calling thread, so that it may call CUDA."""

    @property
    def current(self) -> int: ...

    def make_stream_wait(self, operation: _native.Completion) -> None:
        """Makes later work of the calling thread's current stream wait for the operation."""

    def side_stream(self) -> AbstractContextManager[Any]:
        """Makes a separate stream, which nothing else uses, the current one."""

    def run_on(self, stream: int, task: Callable[[], None]) -> None:
        """Calls `task` with `stream` as the current stream."""

    def used_on(self, stream: int, tensors: tuple[torch.Tensor, ...]) -> None:
        """Tells the allocator that `stream` uses the tensors after the call."""

    def free_later(self, kept: object) -> None:
        """Lets go of an object that was kept for a call, but later and on another thread.

        To free memory that several streams have used, torch calls CUDA, and the group's thread must
        not call CUDA.
        """

    def free_old(self) -> None:
        """Frees these objects except the newest, which the group's thread may still use."""


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
        """Frees all kept objects. Call it when the group's thread has ended."""
        self._kept.clear()


# ---- who waits


@dataclass(slots=True)
class StreamCaller:
    """The streams of a caller whose collective streams wait for, and the copy of its result."""

    streams: Streams
    copy_back: Callable[[], None] | None = None
    """Copies the result to where the user wants it, on the current stream."""


@dataclass(slots=True)
class StreamWait:
    """An operation that streams wait for while the host goes on."""

    streams: Streams
    operation: _native.Completion
    in_order: bool = False
    """Operations of these streams complete in the order in which they were submitted."""
    awaited: bool = False
    """Whether a stream waits for the operation. The script then treats it as done."""

    def begin(self) -> None:
        """Makes later work of the current stream wait for the operation."""
        self.awaited = True
        self.streams.make_stream_wait(self.operation)


def last_of_each(waits: Iterable[StreamWait]) -> tuple[StreamWait, ...]:
    """Leaves out the waits that a later wait on the same in-order streams includes."""
    kept = {id(wait.streams if wait.in_order else wait): wait for wait in waits}
    return tuple(kept.values())


def future_of(waits: tuple[StreamWait, ...], result: Any) -> torch.futures.Future[Any]:
    """Returns a completed future. The stream that takes its value waits; the host does not."""
    streams = waits[0].streams
    future: torch.futures.Future[Any] = torch.futures.Future(devices=streams.devices)
    with streams.side_stream():
        for wait in waits:
            wait.begin()
        future.set_result(result)
    return future


class _DriverCalls:
    """Counts the calls under way, in all groups of this process, whose thread must call CUDA.

    While a stream waits, such a thread may block until that stream goes on. But a peer may need
    this thread's call before the peer reaches what the stream waits for: a deadlock. So while the
    count is not zero, hosts wait instead of streams.
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
        """Counts one call for the time within the context."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    @property
    def any(self) -> bool:
        return self._count > 0


driver_calls: Final = _DriverCalls()
