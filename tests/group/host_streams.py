"""Streams made of threads, so that what waits at a gate can be seen without a GPU.

A group that is given these takes CPU tensors for a GPU's: the engine runs them on HostDevice, and
calls return at once. What a test puts into a stream runs when the stream comes to it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from sealring.engine.cpu import Collective, CpuEngine
from sealring.group.gates import Streams
from sealring.group.gpu import GpuCalls

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
    def __init__(self) -> None:
        self.current = HostStream()
        self._held = HostStream()
        self._drawn = 0
        self._number = 0
        self._changed = threading.Condition()

    @property
    def devices(self) -> list[int | str | torch.device]:
        return []

    def close(self) -> int:
        self._drawn += 1
        return self._drawn

    def hold(self, ticket: int) -> None:
        def wait() -> None:
            with self._changed:
                assert self._changed.wait_for(lambda: self._number >= ticket, PATIENCE_S)

        self.current.put(wait)

    def open(self, ticket: int) -> None:
        with self._changed:
            assert ticket == self._number + 1, "gates open in the order in which they were closed"
            self._number = ticket
            self._changed.notify_all()

    @contextmanager
    def behind(self, ticket: int) -> Iterator[None]:
        before, self.current = self.current, self._held
        self.hold(ticket)
        yield
        self.current = before

    def aside(self, after: Any = None) -> AbstractContextManager[None]:
        return nullcontext()


class HostCalls(GpuCalls):
    def __init__(self, engine: CpuEngine) -> None:
        super().__init__(engine, "stream", PATIENCE_S)
        self.streams = HostStreams()
        self.serving = True
        """Off for calls with "CPU tensors"."""
        engine._native.attach_host(3)

    def serves(self, device: torch.device) -> bool:
        return self.serving

    def attach(self, device: torch.device) -> None:
        self._streams = self.streams

    def prepare(self, collective: Collective, device: torch.device) -> tuple[Collective, Any]:
        self.attach(device)
        return replace(collective, ready=0), None

    @contextmanager
    def on_cpu(self) -> Iterator[None]:
        self.serving = False
        yield
        self.serving = True


_: type[Streams] = HostStreams


def taken_for_a_gpu() -> HostCalls:
    """The default group, from now on with streams."""
    group: Any = dist.group.WORLD
    group._gpu = calls = HostCalls(group._engine)
    return calls
