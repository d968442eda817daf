"""CUDA's streams, as gates need them (gates.Streams, message_gates.MessageStreams)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from sealring.engine.cpu import Collective, CpuEngine
from sealring.engine.mailbox import Mailbox


class CudaStreams:
    def __init__(self, engine: CpuEngine, device: torch.device) -> None:
        self._engine = engine
        self._device = device
        self._shifts = torch.cuda.ExternalStream(engine.shift_stream, device)  # type: ignore[no-untyped-call]
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._remains: deque[object] = deque()

    @property
    def devices(self) -> list[int | str | torch.device]:
        return [self._device]

    def line_up(self, collective: Collective) -> Collective | None:
        self._tidy()
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream(self._device)
            return self._engine.prepare(collective, stream.cuda_stream)

    def line_up_rest(self, then: Callable[[], None] | None) -> int:
        with torch.cuda.stream(self._shifts):  # its device is the current one, too
            self._engine.prepare_rest()
            try:
                if then is not None:
                    then()
            finally:
                over = self._engine.mark_over()
            return over

    def is_over(self, over: int) -> bool:
        return self._engine.is_over(over)

    def hold(self, over: int) -> None:
        self._tidy()
        with torch.cuda.device(self._device):
            self._engine.hold(torch.cuda.current_stream(self._device).cuda_stream, over)

    @contextmanager
    def behind(self, over: int) -> Iterator[None]:
        with torch.cuda.stream(self._side):
            self.hold(over)
            yield

    def leave(self, remains: object) -> None:
        self._remains.append(remains)

    def _tidy(self) -> None:
        """All but the newest, which the group's thread may still be looking at."""
        while len(self._remains) > 1:
            self._remains.popleft()

    def close(self) -> None:
        """The group's thread has ended."""
        self._remains.clear()

    def also_used_by(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """After the call, too: the allocator is told."""
        for tensor in tensors:
            tensor.record_stream(self._shifts)


class CudaMessageStreams:
    """What streams wait for with one group's messages."""

    def __init__(self, mailbox: Mailbox, device: torch.device) -> None:
        self._mailbox = mailbox
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def devices(self) -> list[int | str | torch.device]:
        return [self._device]

    def hold(self, number: int) -> None:
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream(self._device)
            self._mailbox.hold(stream.cuda_stream, number)

    def is_over(self, number: int) -> bool:
        return self._mailbox.is_over(number)

    def beside(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._side)
