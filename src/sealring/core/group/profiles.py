"""Shows collectives and messages in torch.profiler's timeline, with the bytes that this rank seals.

Making a range takes time, so ranges are made only while a profiler runs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from sealring.core.engine.collective import Collective
from sealring.core.engine.engine import CollectiveEngine
from sealring.core.engine.flight import MessageEntry


def range_name(name: str, collective: Collective | None, engine: CollectiveEngine) -> str:
    """The range's name. It includes the bytes, because every table and every trace shows the
    name."""
    if collective is None:  # a call of several collectives, which are not known in advance
        return name
    return f"{name} ({engine.sealed_bytes(collective)} bytes sealed)"


def shown(
    name: str, collective: Collective | None, engine: CollectiveEngine
) -> AbstractContextManager[object]:
    """A range on the current thread; used around the call and around the run of a collective.

    A profiler does not watch the group's thread unless profile_all_threads is set. Without it, a
    queued collective shows only the range of its call.
    """
    if not torch.autograd.profiler._is_profiler_enabled:
        return nullcontext()
    return torch.profiler.record_function(range_name(name, collective, engine))


def message_shown(entry: MessageEntry, *, waiting: bool = False) -> AbstractContextManager[object]:
    """A range for a message's call, or with `waiting` for the wait that moves its bytes."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return nullcontext()
    happens = "sealed" if entry.way == "send" else "opened"
    name = f"sealring::{entry.way} ({entry.bytes} bytes {happens})"
    return torch.profiler.record_function(f"{name}, waiting" if waiting else name)
