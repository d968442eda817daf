"""Calls with CUDA tensors: when they may begin, and what is done when they end.

The engine works on streams of its own. It begins after what the caller's stream was given before
the call. A work is done when every record has been checked and the GPU has written the last byte:
only then could an error still be raised before somebody uses the result. So a stream that comes
after wait() finds the result there, and the caching allocator gets no memory back early, because
the group keeps a call's tensors until then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from sealring.engine.cpu import Collective, CpuEngine


def prepare(
    engine: CpuEngine, collective: Collective, device: torch.device
) -> tuple[Collective, torch.cuda.Event]:
    """The collective as the GPU's engine takes it. The event must live until it has been run."""
    with torch.cuda.device(device):
        engine.use_gpu(device.index, collective.dtype, collective.reduction)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
    return replace(collective, ready=ready.cuda_event), ready


def finished(
    copy_back: Callable[[], None] | None, device: torch.device
) -> Callable[[], None] | None:
    """The same, and it returns when the GPU has done it."""
    if copy_back is None:
        return None

    def copy() -> None:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            copy_back()
        stream.synchronize()

    return copy
