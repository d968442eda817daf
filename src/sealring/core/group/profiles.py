"""Collectives and messages in torch.profiler's timeline, each with the bytes that this rank seals.

Ranges are not free, so they are made only for a profiler.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from sealring.core.engine.collective import Collective
from sealring.core.engine.engine import CollectiveEngine
from sealring.core.engine.flight import MessageEntry


def range_name(name: str, collective: Collective | None, engine: CollectiveEngine) -> str:
    """In the name, because that is what tables and every trace show, whatever was recorded."""
    if collective is None:  # several, of which only the first is known yet
        return name
    return f"{name} ({engine.sealed_bytes(collective)} bytes sealed)"


def shown(
    name: str, collective: Collective | None, engine: CollectiveEngine
) -> AbstractContextManager[object]:
    """A range on the calling thread: the call itself, and the run on the thread that runs it.

    A profiler watches the threads it knows, and the group's own is not among them unless it is told
    (profile_all_threads): a queued collective then shows where it was called.
    """
    if not torch.autograd.profiler._is_profiler_enabled:
        return nullcontext()
    return torch.profiler.record_function(range_name(name, collective, engine))


def message_shown(entry: MessageEntry, *, waiting: bool = False) -> AbstractContextManager[object]:
    """A range for the call, and one for the wait that moves the message's bytes."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return nullcontext()
    happens = "sealed" if entry.way == "send" else "opened"
    name = f"sealring::{entry.way} ({entry.bytes} bytes {happens})"
    return torch.profiler.record_function(f"{name}, waiting" if waiting else name)
