"""Streams made of threads, so that what waits for a call can be seen without a GPU.

A group that is given these takes CPU tensors for a GPU's: the engine runs them on HostDevice, and
calls return at once. What a test puts into a stream runs when the stream comes to it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from sealring.engine.collective import Collective
from sealring.engine.engine import CollectiveEngine
from sealring.engine.mailbox import Mailbox
from sealring.group.gpu import CallerStream, GpuCalls
from sealring.group.streams import MessageStreams, Streams
from tests.engine.stand_ins import attach_host_device, attach_host_driver_to_mailbox

PATIENCE_S = 60
"""Ends a hang."""


class HostStream(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self.start()

    def put(self, task: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        self._tasks.put((task, done))
        return done

    def run(self) -> None:
        while True:
            task, done = self._tasks.get()
            done.set_result(task())


class HostStreams:
    def __init__(self, engine: CollectiveEngine | None = None) -> None:
        self.current = HostStream()
        self.side = HostStream()
        self.kernels = HostStream()
        """In which calls are done, one after the other."""
        self._engine = engine
        self._queued = 0
        self._over = 0
        self._changed = threading.Condition()

    @property
    def devices(self) -> list[int | str | torch.device]:
        return []

    def prelaunch(self, collective: Collective) -> Collective | None:
        return collective if self._engine is None else self._engine.prelaunch(collective)

    def launch_rest(self, then: Callable[[], None] | None) -> Future[Any]:
        self._queued += 1
        number = self._queued

        def done() -> None:
            with self._changed:
                assert self._changed.wait_for(lambda: self._over >= number, PATIENCE_S)

        self.kernels.put(done)
        return self.kernels.put(then or (lambda: None))

    def is_done(self, over: Future[Any]) -> bool:
        return over.done()

    def make_stream_wait(self, over: Future[Any]) -> None:
        self.current.put(lambda: over.result(PATIENCE_S))

    @contextmanager
    def waiting_stream(self, over: Future[Any]) -> Iterator[None]:
        before, self.current = self.current, self.side
        self.make_stream_wait(over)
        yield
        self.current = before

    def free_later(self, kept: object) -> None:
        with self._changed:
            self._over += 1
            self._changed.notify_all()


class HostMessageStreams:
    """The same for messages; they are told to a GPU whose driver the CPU plays."""

    def __init__(self, mailbox: Mailbox, streams: HostStreams) -> None:
        self._native = mailbox._native
        self._streams = streams
        self.stream = attach_host_driver_to_mailbox(mailbox._native)
        """Of the script's, and always free."""

    @property
    def devices(self) -> list[int | str | torch.device]:
        return []

    def make_stream_wait(self, number: int) -> None:
        def over() -> None:
            given_up = time.monotonic() + PATIENCE_S
            while not self._native.is_done(number):
                assert time.monotonic() < given_up
                time.sleep(1e-4)

        self._streams.current.put(over)

    def is_done(self, number: int) -> bool:
        return self._native.is_done(number)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        before, self._streams.current = self._streams.current, self._streams.side
        yield
        self._streams.current = before


class HostCalls(GpuCalls):
    def __init__(self, engine: CollectiveEngine) -> None:
        super().__init__(engine, "stream")
        self.streams = HostStreams(engine)
        self.serving = True
        """Off for calls with "CPU tensors"."""
        self.messages: HostMessageStreams | None = None
        engine.shares_gpu = True
        attach_host_device(engine._native, 3, len(engine.topology.host_of))

    def serves(self, device: torch.device) -> bool:
        return self.serving

    def attach(self, device: torch.device) -> None:
        self._streams = self.streams

    def prepare(self, collective: Collective, device: torch.device) -> tuple[Collective, Any]:
        self.attach(device)
        return replace(collective, ready=0), 0

    def finished(
        self, copy_back: Callable[[], None] | None, device: torch.device
    ) -> Callable[[], None] | None:
        return copy_back

    def begin_message(self, mailbox: Mailbox, device: torch.device) -> CallerStream:
        if self.messages is None:
            self.messages = HostMessageStreams(mailbox, self.streams)
        return CallerStream(0, self.messages.stream, self.messages)

    @contextmanager
    def on_cpu(self) -> Iterator[None]:
        self.serving = False
        yield
        self.serving = True


_: type[Streams] = HostStreams
__: type[MessageStreams] = HostMessageStreams


def taken_for_a_gpu() -> HostCalls:
    """The default group, from now on with streams."""
    group: Any = dist.group.WORLD
    group._gpu = group._messages.gpu = calls = HostCalls(group._engine)
    return calls
