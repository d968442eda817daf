"""Streams made of threads, so that what waits for a call can be seen without a GPU.

What a test puts into a stream runs when the stream comes to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from sealring import _native, _stand_ins
from sealring.core.engine.streams import Devices, Streams

PATIENCE_S = 60
"""A test that waits longer than this fails instead of hanging."""


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
    def __init__(self, current: int = 0) -> None:
        self.current = current or _stand_ins.new_stream()
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


_: type[Streams] = HostStreams
