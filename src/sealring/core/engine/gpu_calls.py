"""Calls with CUDA tensors: when they may begin, what waits for them, and what is done at the end.

The engine works on streams of its own. It begins after the work that the caller's stream had before
the call, and a call is done when every record has been checked and the GPU has written the last
byte. The group keeps a call's tensors until then, so the caching allocator gets no memory back
that is still read or written, on whatever stream it would be used next.

The stream waits, as with NCCL: wait() returns at once, and later work of the current stream waits
for the call (streams.py). Or the host waits: wait() returns when the call is done, and raises its
error. The host waits where a stream cannot, and by default where ranks share a GPU: processes get
such a GPU in time slices, and one whose streams wait keeps it for the whole of its slice.

In a group's first call with a GPU all ranks agree on the way between their GPUs. Every rank does
this in its own first call, before it chooses anything for that call: the best algorithm and the cut
of the tensors depend on the way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from sealring import _native
from sealring.core.engine.collective import Collective
from sealring.core.engine.cuda.wires import Wire
from sealring.core.engine.engine import CollectiveEngine
from sealring.core.engine.mailbox import Mailbox
from sealring.core.engine.streams import (
    CudaStreams,
    StreamCaller,
    Streams,
    driver_calls,
    new_event,
    new_stream,
    require_no_capture,
    synchronized,
)
from sealring.core.schedule import Algorithm, Operation, Selection
from sealring.core.settings import CudaWait
from sealring.errors import Unsupported

Introduce = Callable[[Iterable[Collective]], None]
"""Runs the collectives by which ranks agree; returns when they are done."""


class Prepared(NamedTuple):
    """A collective whose GPU is ready for it."""

    collective: Collective
    event: object
    """After which the memory may be used. Kept until the collective has been run."""
    stream: StreamCaller | None
    """None where the host waits."""
    copy_back: Callable[[], None] | None
    """What the host does at the end, where it waits."""


class MessageCaller(NamedTuple):
    """Where a message's caller is on the GPU."""

    stream: _native.CallerStream
    streams: Streams
    streams_wait: bool
    event: object = None
    """After which the memory may be used. Kept until it has been reached."""


class GpuCalls:
    """One group's calls with CUDA tensors."""

    def __init__(self, engine: CollectiveEngine, wait: CudaWait, wanted: Wire = Wire.AUTO) -> None:
        self.engine = engine
        self._wait = wait
        self._wanted = wanted
        # Each has a side stream of its own: a future of one must not wait behind the other's.
        self.streams: Streams | None = None
        self._message_streams: Streams | None = None
        self._attached = False
        self._attaching = threading.Lock()
        self._agreed = False
        self._refused: Unsupported | None = None
        self._agreeing = threading.Lock()
        """The script's thread and its backward pass's may both come with a first tensor."""
        self._choices: tuple[Selection, Selection] | None = None

    def close(self) -> None:
        """Called when the group's thread has ended."""
        for streams in (self.streams, self._message_streams):
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
            self.engine.use_gpu(device.index, prelaunch=self._wait != "host")
            self.streams = self.streams or CudaStreams(device)

    def name_of(self, device: torch.device) -> str:
        """The same for all processes that use this GPU, and for no others."""
        return str(torch.cuda.get_device_properties(device).uuid)

    # ---- the way between the GPUs

    def agree(self, device: torch.device, introduce: Introduce, timeout_s: float) -> None:
        """In the group's first call with a GPU: all ranks agree on the way between their GPUs."""
        if self._agreed:
            return
        with self._agreeing, driver_calls.counted():
            if self._agreed:
                return
            if self._refused is not None:
                raise self._refused
            problem = gpu = ""
            try:
                self.attach(device)
                gpu = self.name_of(device)
            except Exception as unable:  # whatever it is, the others must not wait for this rank
                problem = str(unable) or repr(unable)
            try:
                introduce(self.engine.agree_on_wire(self._wanted, problem, gpu, timeout_s))
            except Unsupported as refusal:
                self._refused = refusal  # all ranks have it, and need not ask again
                raise
            self._agreed = True

    def choose(
        self,
        chosen: Selection,
        operation: Operation,
        nbytes: int,
        device: torch.device,
        introduce: Introduce,
        timeout_s: float,
    ) -> Algorithm:
        """The group's own choice, as the way between the GPUs allows it.

        Raises Unsupported while the caller's stream is captured, and where ranks cannot agree.
        """
        self.require_no_capture(device, operation.name.lower())
        self.agree(device, introduce, timeout_s)
        return self._allowed(chosen)(operation, nbytes)

    def _allowed(self, chosen: Selection) -> Selection:
        if not self.engine.wired:
            return chosen
        if self._choices is None or self._choices[0] is not chosen:
            self._choices = (chosen, chosen.without_forwards())
        return self._choices[1]

    def link(self, collective: Collective, introduce: Introduce, timeout_s: float) -> None:
        """Makes ready what the collective's program needs before GPUs run it, once per program."""
        if self.engine.gpus_lack_links(collective):
            with driver_calls.counted(), self.engine.no_launches_ahead():
                introduce(self.engine.link_gpus(collective, timeout_s))

    # ---- one call

    def prepare(
        self,
        collective: Collective,
        device: torch.device,
        copy_back: Callable[[], None] | None,
        used: tuple[torch.Tensor, ...],
        introduce: Introduce,
        timeout_s: float,
    ) -> Prepared:
        """Makes the GPU ready for a collective. `used` are the tensors that it or the copy uses.

        Raises Unsupported while the caller's stream is captured: nothing is queued before it.
        """
        self.require_no_capture(device, collective.operation.name.lower())
        collective, event = self._begin(collective, device)
        self.link(collective, introduce, timeout_s)
        if self.streams is None or not self.streams_wait or driver_calls.any:
            return Prepared(collective, event, None, self.finished(copy_back, device))
        if copy_back is not None:
            self.streams.used_on(self.engine.prelaunch_stream, used)
        caller = StreamCaller(self.streams, copy_back)
        return Prepared(collective, event, caller, self.finished(copy_back, device))

    def _begin(self, collective: Collective, device: torch.device) -> tuple[Collective, Any]:
        """The collective as the engine takes it, and what must live until it has been run."""
        self.attach(device)
        with torch.cuda.device(device):
            self.engine.use_gpu(device.index, collective.dtype, collective.reduction)
            ready = new_event()
            ready.record()
        return replace(collective, ready=ready.cuda_event), ready

    @property
    def streams_wait(self) -> bool:
        shared = self._wait == "auto" and self.engine.shares_gpu
        return self.engine.prelaunch_stream != 0 and not shared

    def finished(
        self, copy_back: Callable[[], None] | None, device: torch.device
    ) -> Callable[[], None] | None:
        """Like `copy_back`, but returns when the GPU has done it, whichever thread calls it."""
        if copy_back is None:
            return None

        def copy() -> None:
            with synchronized(new_stream(device)):
                copy_back()

        return copy

    # ---- messages

    @property
    def streams_wait_for_messages(self) -> bool:
        """Once the ranks have agreed on a wire, by collectives that need the driver."""
        shared = self.engine.shares_gpu
        return shared is not None and (
            self._wait == "stream" or (self._wait == "auto" and not shared)
        )

    def message_caller(self, mailbox: Mailbox, device: torch.device) -> MessageCaller:
        """Makes ready what the message needs, and marks where the caller's stream is."""
        with torch.cuda.device(device):
            event = new_event()
            event.record()
            mailbox.use_gpu(device.index, streams_wait=self._wait != "host")
        streams = self._message_streams = self._message_streams or CudaStreams(device)
        streams_wait = self.streams_wait_for_messages and not driver_calls.any
        caller = _native.CallerStream(event.cuda_event, streams.current, streams_wait)
        return MessageCaller(caller, streams, streams_wait, event)


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
