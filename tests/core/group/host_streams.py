"""Streams made of threads, so that what waits for a call can be seen without a GPU.

A group that is given these takes CPU tensors for a GPU's: CUDA's driver is played by the CPU, and
calls return at once. What a test puts into a stream runs when the stream comes to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from sealring import _native, _stand_ins
from sealring.core.engine.collective import Collective
from sealring.core.engine.engine import CollectiveEngine
from sealring.core.engine.mailbox import Mailbox
from sealring.core.group.completions import driver_calls
from sealring.core.group.gpu import GpuCalls, MessageCaller
from sealring.core.group.streams import Devices, Streams
from sealring.errors import Unsupported
from tests.core.engine.stand_ins import attach_host_driver, attach_host_driver_to_mailbox

PATIENCE_S = 60
"""Ends a hang."""


def put(stream: int, task: Callable[[], Any]) -> Future[Any]:
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(task())
        except BaseException as error:  # the stream goes on
            done.set_exception(error)

    _stand_ins.put(stream, run)
    return done


class HostStreams:
    def __init__(self) -> None:
        self.current = _stand_ins.new_stream()
        self.side = _stand_ins.new_stream()

    @property
    def devices(self) -> Devices:
        return []

    def guard(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def make_stream_wait(self, operation: _native.Completion) -> None:
        operation.wait_on_stream(self.current)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        before, self.current = self.current, self.side
        yield
        self.current = before

    def run_on(self, stream: int, task: Callable[[], None]) -> None:
        put(stream, task)

    def used_on(self, stream: int, tensors: tuple[torch.Tensor, ...]) -> None:
        pass

    def free_later(self, kept: object) -> None:
        pass

    def free_old(self) -> None:
        pass

    def put(self, task: Callable[[], Any]) -> Future[Any]:
        """Into the current stream."""
        return put(self.current, task)


class HostCalls(GpuCalls):
    def __init__(self, engine: CollectiveEngine) -> None:
        super().__init__(engine, "stream")
        self._streams = self.streams = HostStreams()
        self.serving = True
        """Off for calls with "CPU tensors"."""
        self.capturing = False
        """On for calls from a stream whose work becomes a CUDA graph."""
        self._mailbox_attached = False
        engine.shares_gpu = True
        attach_host_driver(engine._native, prelaunch=True)

    def serves(self, device: torch.device) -> bool:
        return self.serving

    def require_no_capture(self, device: torch.device, what: str) -> None:
        if self.capturing:
            raise Unsupported(f"{what} cannot be part of a CUDA graph")

    def attach(self, device: torch.device) -> None:
        pass

    def prepare(self, collective: Collective, device: torch.device) -> tuple[Collective, Any]:
        return replace(collective, ready=0), 0

    def finished(
        self, copy_back: Callable[[], None] | None, device: torch.device
    ) -> Callable[[], None] | None:
        return copy_back

    def message_caller(self, mailbox: Mailbox, device: torch.device) -> MessageCaller:
        if not self._mailbox_attached:
            self.free = attach_host_driver_to_mailbox(mailbox._native)
            self._mailbox_attached = True
        streams_wait = self.streams_wait_for_messages and not driver_calls.any
        caller = _native.CallerStream(0, self.free, streams_wait)
        return MessageCaller(caller, self.streams, streams_wait)

    @contextmanager
    def on_cpu(self) -> Iterator[None]:
        self.serving = False
        yield
        self.serving = True


_: type[Streams] = HostStreams


def taken_for_a_gpu() -> HostCalls:
    """The default group, from now on with streams."""
    group: Any = dist.group.WORLD
    group._gpu = group._messages.gpu = calls = HostCalls(group._engine)
    group._prepare = lambda *_: None  # what is kept is for tensors of a CPU, as these seem to be
    return calls
