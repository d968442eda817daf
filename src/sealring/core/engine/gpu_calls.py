"""Calls with CUDA tensors: when they begin, whether the stream or the host waits, and how they end.

The engine has its own streams. A call begins after the work that the caller's stream had before it.
It is done when every record has been checked and the GPU has written the last byte. The group keeps
a call's tensors until then, so the caching allocator cannot reuse memory that is still read or
written.

Usually the stream waits, as with NCCL: wait() returns at once, and later work of the current stream
waits for the call (streams.py). Otherwise the host waits: wait() returns when the call is done, and
raises its error. The host waits if a stream cannot wait, and by default if ranks share a GPU. Such
ranks use the GPU in time slices, and a process whose streams wait would occupy its whole slice.

In a group's first call with a GPU all ranks agree on the way between their GPUs. Each rank does
this before it chooses anything else for that call, because the best algorithm and the segments of
the tensors depend on the way.
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
"""A function that runs collectives by which ranks agree, and returns when they are done."""


class Prepared(NamedTuple):
    """A collective whose GPU is ready for it."""

    collective: Collective
    event: object
    """The CUDA event after which the memory may be used. Keep it until the collective has run."""
    stream: StreamCaller | None
    """None if the host waits."""
    copy_back: Callable[[], None] | None
    """What the host does after the collective, if it waits."""


class MessageCaller(NamedTuple):
    """The caller's stream for one message, and whether streams wait for the message."""

    stream: _native.CallerStream
    streams: Streams
    streams_wait: bool
    event: object = None
    """The CUDA event after which the memory may be used. Keep it until it has been reached."""


class GpuCalls:
    """One group's calls with CUDA tensors."""

    def __init__(self, engine: CollectiveEngine, wait: CudaWait, wanted: Wire = Wire.AUTO) -> None:
        self.engine = engine
        self._wait = wait
        self._wanted = wanted
        # Collectives and messages have separate side streams, so that the future of a collective
        # does not wait behind that of a message, or the other way round.
        self.streams: Streams | None = None
        self._message_streams: Streams | None = None
        self._attached = False
        self._attaching = threading.Lock()
        self._agreed = False
        self._refused: Unsupported | None = None
        self._agreeing = threading.Lock()
        """Held while ranks agree: the script's thread and the backward pass's thread may both
        bring a first tensor."""
        self._choices: tuple[Selection, Selection] | None = None

    def close(self) -> None:
        """Called when the group's thread has ended."""
        for streams in (self.streams, self._message_streams):
            if isinstance(streams, CudaStreams):
                streams.close()

    def serves(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def require_no_capture(self, device: torch.device, what: str) -> None:
        """Raises Unsupported while the caller's stream is captured. Call it before anything is
        queued."""
        require_no_capture(device, what)

    def attach(self, device: torch.device) -> None:
        """Prepares what every call needs; raises Unsupported with the reason if that fails."""
        with self._attaching:
            if not self._attached:
                self._attach(device)
                self._attached = True

    def _attach(self, device: torch.device) -> None:
        try:
            torch.empty(1, device=device)  # makes torch create the CUDA context
        except RuntimeError as problem:
            raise Unsupported(f"{device} cannot be used: {problem}") from problem
        with torch.cuda.device(device):
            self.engine.use_gpu(device.index, prelaunch=self._wait != "host")
            self.streams = self.streams or CudaStreams(device)

    def name_of(self, device: torch.device) -> str:
        """The GPU's UUID, which is equal in all processes that use this GPU."""
        return str(torch.cuda.get_device_properties(device).uuid)

    # ---- the way between the GPUs

    def agree(self, device: torch.device, introduce: Introduce, timeout_s: float) -> None:
        """Makes all ranks agree on the way between their GPUs, in the group's first GPU call."""
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
            except Exception as unable:  # any error: the other ranks must not wait for this one
                problem = str(unable) or repr(unable)
            try:
                introduce(self.engine.agree_on_wire(self._wanted, problem, gpu, timeout_s))
            except Unsupported as refusal:
                self._refused = refusal  # all ranks have the same refusal and need not ask again
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
        """Chooses the algorithm by `chosen`, limited to what the way between the GPUs allows.

        Raises Unsupported while the caller's stream is captured, and if the ranks cannot agree.
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
        """Makes the links that the collective's program needs before GPUs run it; once per
        program."""
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
        """Prepares the GPU for a collective. `used` has the tensors of the collective and the copy.

        Raises Unsupported while the caller's stream is captured, before anything is queued.
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
        """Returns the collective with its event, and the event object, to be kept until it has
        run."""
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
        """Wraps `copy_back` so that it returns when the GPU is done. Any thread may call it."""
        if copy_back is None:
            return None

        def copy() -> None:
            with synchronized(new_stream(device)):
                copy_back()

        return copy

    # ---- messages

    @property
    def streams_wait_for_messages(self) -> bool:
        """Whether streams may wait for messages. False until the ranks have agreed on a wire, since
        the collectives for that call the driver."""
        shared = self.engine.shares_gpu
        return shared is not None and (
            self._wait == "stream" or (self._wait == "auto" and not shared)
        )

    def message_caller(self, mailbox: Mailbox, device: torch.device) -> MessageCaller:
        """Prepares what a message needs, and records an event on the caller's stream."""
        with torch.cuda.device(device):
            event = new_event()
            event.record()
            mailbox.use_gpu(device.index, streams_wait=self._wait != "host")
        streams = self._message_streams = self._message_streams or CudaStreams(device)
        streams_wait = self.streams_wait_for_messages and not driver_calls.any
        caller = _native.CallerStream(event.cuda_event, streams.current, streams_wait)
        return MessageCaller(caller, streams, streams_wait, event)


def in_use(environ: Mapping[str, str]) -> torch.device | None:
    """The GPU that this process will certainly use, so that groups can prepare it at once; or None.

    A process chooses its GPU by torch.cuda.set_device or by a first tensor. Before that it may
    still stay on the CPU. A process whose current device is the first of several GPUs, and which is
    not the host's first worker, has probably not chosen yet. A wrong guess would be bad: a group
    can use only one GPU.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    chosen = torch.cuda.current_device()
    if chosen == 0 and torch.cuda.device_count() > 1 and environ.get("LOCAL_RANK") != "0":
        return None
    return torch.device("cuda", chosen)
