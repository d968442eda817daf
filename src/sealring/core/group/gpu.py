"""Calls with CUDA tensors: when they may begin, what waits for them, and what is done at the end.

The engine works on streams of its own. It begins after the work that the caller's stream had before
the call, and a call is done when every record has been checked and the GPU has written the last
byte. The group keeps a call's tensors until then, so the caching allocator gets no memory back
that is still read or written, on whatever stream it would be used next.

The stream waits, as with NCCL: wait() returns at once, and later work of the current stream waits
for the call (completions.py). Or the host waits: wait() returns when the call is done, and raises
its error. The host waits where a stream cannot, and by default where ranks share a GPU: processes
get such a GPU in time slices, and one whose streams wait keeps it for the whole of its slice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from sealring import _native
from sealring.core.engine.collective import Collective
from sealring.core.engine.cuda.streams import require_no_capture
from sealring.core.engine.engine import CollectiveEngine
from sealring.core.engine.mailbox import Mailbox
from sealring.core.group.completions import Prelaunch, driver_calls
from sealring.core.group.settings import CudaWait
from sealring.core.group.streams import CudaStreams, Streams
from sealring.errors import Unsupported


@dataclass(frozen=True, slots=True)
class MessageCaller:
    """Where a message's caller is on the GPU."""

    stream: _native.CallerStream
    streams: Streams
    streams_wait: bool
    event: object = None
    """After which the memory may be used. Kept until it has been reached."""


class GpuCalls:
    """One group's calls with CUDA tensors."""

    def __init__(self, engine: CollectiveEngine, wait: CudaWait) -> None:
        self._engine = engine
        self._wait = wait
        # Each has a side stream of its own: a future of one must not wait behind the other's.
        self._streams: Streams | None = None
        self._message_streams: Streams | None = None
        self._attached = False
        self._attaching = threading.Lock()

    def close(self) -> None:
        """Called when the group's thread has ended."""
        for streams in (self._streams, self._message_streams):
            if isinstance(streams, CudaStreams):
                streams.close()

    def serves(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def require_no_capture(self, device: torch.device, what: str) -> None:
        """Raises Unsupported while the caller's stream is captured. Nothing is queued before it."""
        require_no_capture(device, what)

    def attach(self, device: torch.device) -> None:
        """Makes ready what every call needs; raises Unsupported, with the reason, if it cannot."""
        with self._attaching:
            if not self._attached:
                self._attach(device)
                self._attached = True

    def _attach(self, device: torch.device) -> None:
        try:
            torch.empty(1, device=device)  # torch has begun to use it: there is a context
        except RuntimeError as problem:
            raise Unsupported(f"{device} cannot be used: {problem}") from problem
        with torch.cuda.device(device):
            self._engine.use_gpu(device.index, prelaunch=self._wait != "host")
            self._streams = self._streams or CudaStreams(device)

    def prepare(self, collective: Collective, device: torch.device) -> tuple[Collective, Any]:
        """The collective as the engine takes it, and what must live until it has been run."""
        self.attach(device)
        with torch.cuda.device(device):
            self._engine.use_gpu(device.index, collective.dtype, collective.reduction)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        return replace(collective, ready=ready.cuda_event), ready

    def name_of(self, device: torch.device) -> str:
        """The same for all processes that use this GPU, and for no others."""
        return str(torch.cuda.get_device_properties(device).uuid)

    @property
    def streams_wait(self) -> bool:
        shared = self._wait == "auto" and self._engine.shares_gpu
        return self._engine.prelaunch_stream != 0 and not shared

    @property
    def streams_wait_for_messages(self) -> bool:
        """Once the ranks have agreed on a wire, by collectives that need the driver."""
        shared = self._engine.shares_gpu
        return shared is not None and (
            self._wait == "stream" or (self._wait == "auto" and not shared)
        )

    def message_caller(self, mailbox: Mailbox, device: torch.device) -> MessageCaller:
        """Makes ready what the message needs, and marks where the caller's stream is."""
        with torch.cuda.device(device):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            mailbox.use_gpu(device.index, streams_wait=self._wait != "host")
        streams = self._message_streams = self._message_streams or CudaStreams(device)
        streams_wait = self.streams_wait_for_messages and not driver_calls.any
        caller = _native.CallerStream(event.cuda_event, streams.current, streams_wait)
        return MessageCaller(caller, streams, streams_wait, event)

    def prelaunch(
        self,
        collective: Collective,
        copy_back: Callable[[], None] | None,
        used: tuple[torch.Tensor, ...],
    ) -> Prelaunch | None:
        """How streams can wait for one call; None where the host waits.

        `used` are the tensors that it uses, and that `copy_back` does.
        """
        if self._streams is None or not self.streams_wait or driver_calls.any:
            return None
        if copy_back is not None:
            self._streams.used_on(self._engine.prelaunch_stream, used)
        return Prelaunch(self._engine, self._streams, collective, copy_back)

    def finished(
        self, copy_back: Callable[[], None] | None, device: torch.device
    ) -> Callable[[], None] | None:
        """The same, and it returns when the GPU has done it."""
        return None if copy_back is None else done_by_the_gpu(copy_back, device)


def done_by_the_gpu(copy_back: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The same, and it returns when the GPU has done it, whichever thread calls it."""

    def copy() -> None:
        with alone_on(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            copy_back()

    return copy


@contextmanager
def alone_on(stream: torch.cuda.Stream) -> Iterator[None]:
    """In it the stream is the current one; the end waits for the GPU."""
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def in_use(environ: Mapping[str, str]) -> torch.device | None:
    """The GPU that this process will use, if that is clear: then groups make it ready at once.

    torch.cuda.set_device, or a first tensor, makes it so. A process that has CUDA at hand and has
    not touched it may stay on the CPU; one that is on the first of several GPUs, and is not their
    first worker, has not chosen yet. A group has one GPU: a wrong guess would cost it that one.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    chosen = torch.cuda.current_device()
    if chosen == 0 and torch.cuda.device_count() > 1 and environ.get("LOCAL_RANK") != "0":
        return None
    return torch.device("cuda", chosen)
