"""Calls with CUDA tensors: when they may begin, what waits for them, and what is done at the end.

The engine works on streams of its own. It begins after what the caller's stream was given before
the call, and a call is over when every record has been checked and the GPU has written the last
byte. The group keeps a call's tensors until then, so the caching allocator gets no memory back
that is still read or written, on whatever stream it would be used next.

Who waits is a setting. The host: wait() returns when the call is over, and raises its error. Or the
stream, as with NCCL: wait() returns at once, and what the current stream is given from then on
waits at the call's gate (gates.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch

from sealring import _native
from sealring.engine.cpu import Collective, CpuEngine
from sealring.errors import Unsupported
from sealring.group.gates import (
    Gate,
    Streams,
    keep_until_all_are_open,
    while_all_are_open,
)
from sealring.group.settings import CudaWait


class CudaStreams:
    def __init__(self, device: torch.device, patience_s: float) -> None:
        self._device = device
        try:
            with while_all_are_open():
                self._gate = _native.StreamGate(device.index, patience_s)
        except RuntimeError as problem:
            raise Unsupported(
                f"SEALRING_CUDA_WAIT is stream, and that cannot be: {problem}; or set "
                "SEALRING_CUDA_WAIT=host, and wait() blocks"
            ) from problem
        self._held = torch.cuda.ExternalStream(self._gate.held, device)  # type: ignore[no-untyped-call]
        self._free = torch.cuda.ExternalStream(self._gate.free, device)  # type: ignore[no-untyped-call]

    @property
    def devices(self) -> list[int | str | torch.device]:
        return [self._device]

    def close(self) -> int:
        return self._gate.close()

    def hold(self, ticket: int) -> None:
        with torch.cuda.device(self._device):
            self._gate.hold(torch.cuda.current_stream(self._device).cuda_stream, ticket)

    def open(self, ticket: int) -> None:
        self._gate.open(ticket)

    @contextmanager
    def behind(self, ticket: int) -> Iterator[None]:
        with torch.cuda.stream(self._held):
            self._gate.hold(self._held.cuda_stream, ticket)
            yield

    def aside(self, after: torch.cuda.Event | None = None) -> AbstractContextManager[None]:
        return alone_on(self._free, after)


class GpuCalls:
    """One group's calls with CUDA tensors."""

    def __init__(self, engine: CpuEngine, wait: CudaWait, patience_s: float) -> None:
        self._engine = engine
        self._wait = wait
        self._patience_s = patience_s
        self._streams: Streams | None = None
        self._attached = False

    def __del__(self) -> None:
        # The engine's memory on the GPU goes with it.
        keep_until_all_are_open(self._engine)

    def serves(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def attach(self, device: torch.device) -> None:
        """Makes ready what every call needs; raises Unsupported, with the reason, if it cannot."""
        if self._attached:
            return
        try:
            torch.empty(1, device=device)  # torch has begun to use it: there is a context
        except RuntimeError as problem:
            raise Unsupported(f"{device} cannot be used: {problem}") from problem
        with torch.cuda.device(device):
            self._engine.use_gpu(device.index, loading=while_all_are_open)
        if self._wait == "stream" and self._streams is None:
            self._streams = CudaStreams(device, self._patience_s)
        self._attached = True

    def prepare(self, collective: Collective, device: torch.device) -> tuple[Collective, Any]:
        """The collective as the engine takes it, and what must live until it has been run."""
        self.attach(device)
        with torch.cuda.device(device):
            self._engine.use_gpu(
                device.index, collective.dtype, collective.reduction, loading=while_all_are_open
            )
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        return replace(collective, ready=ready.cuda_event), ready

    @property
    def streams_wait(self) -> bool:
        return self._streams is not None

    def gate(self, written: Sequence[torch.Tensor]) -> Gate | None:
        """What streams will wait at for one call; None where the host waits."""
        return None if self._streams is None else Gate(self._streams, written)

    def finished(
        self, copy_back: Callable[[], None] | None, device: torch.device
    ) -> Callable[[], None] | None:
        """The same, and it returns when the GPU has done it."""
        if copy_back is None:
            return None

        def copy() -> None:
            if self._streams is not None:
                aside = self._streams.aside()
            else:
                aside = alone_on(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
            with aside:
                copy_back()

        return copy


@contextmanager
def alone_on(stream: torch.cuda.Stream, after: torch.cuda.Event | None = None) -> Iterator[None]:
    """In it the stream is the current one, behind the event; the end waits for the GPU."""
    with torch.cuda.stream(stream):
        if after is not None:
            stream.wait_event(after)
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
