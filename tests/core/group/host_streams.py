"""A group that takes CPU tensors for a GPU's. The CPU plays CUDA's driver; calls return at once.

Its streams are those of tests/core/engine/host_streams.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from sealring import _native
from sealring.core.engine.collective import Collective
from sealring.core.engine.engine import CollectiveEngine
from sealring.core.engine.gpu_calls import GpuCalls, MessageCaller
from sealring.core.engine.mailbox import Mailbox
from sealring.core.engine.streams import driver_calls
from sealring.errors import Unsupported
from tests.core.engine.host_streams import HostStreams
from tests.core.engine.stand_ins import attach_host_driver, attach_host_driver_to_mailbox


class HostCalls(GpuCalls):
    def __init__(self, engine: CollectiveEngine) -> None:
        super().__init__(engine, "stream")
        self.streams: HostStreams = HostStreams()
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

    def _begin(self, collective: Collective, device: torch.device) -> tuple[Collective, Any]:
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


def taken_for_a_gpu() -> HostCalls:
    """Gives the default group streams from now on."""
    group: Any = dist.group.WORLD
    group.use_gpu_calls(calls := HostCalls(group.engine))
    return calls
