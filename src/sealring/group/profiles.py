"""Collectives in torch.profiler's timeline, each with the bytes that this rank seals for it.

Ranges are not free, so they are made only for a profiler.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from sealring.engine.cpu import Collective, CpuEngine
from sealring.group.work import SealedWork


def range_name(name: str, collective: Collective | None, engine: CpuEngine) -> str:
    """In the name, because that is what tables and every trace show, whatever was recorded."""
    if collective is None:  # several, of which only the first is known yet
        return name
    return f"{name} ({engine.sealed_bytes(collective)} bytes sealed)"


def shown(
    name: str, collective: Collective | None, engine: CpuEngine
) -> AbstractContextManager[object]:
    """A range on the calling thread, for a collective that runs there."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return nullcontext()
    return torch.profiler.record_function(range_name(name, collective, engine))


def shown_until_done(
    name: str, collective: Collective | None, engine: CpuEngine, work: SealedWork
) -> None:
    """A range from now to the work's end, for a collective that another thread runs.

    A profiler watches the threads it knows, and ours is not among them: so the range belongs to the
    caller's thread, and the future ends it, as torch's own asynchronous operations do it.
    """
    if torch.autograd.profiler._is_profiler_enabled:
        with shown(name, collective, engine) as begun:
            begun._call_end_callbacks_on_future(work.get_future())  # type: ignore[attr-defined]
