"""torch's streams and events, which have no types of their own."""

from __future__ import annotations

import torch

from sealring.errors import Unsupported


def new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call,no-any-return,unused-ignore]


def new_event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call,no-any-return,unused-ignore]


def require_no_capture(device: torch.device, what: str) -> None:
    """Raises Unsupported while the current stream's work becomes a CUDA graph.

    A replay repeats kernels with the arguments of the capture, so it would use nonces again, and it
    repeats nothing that the host or another rank does.
    """
    if _is_captured(device):
        raise Unsupported(
            f"{what} cannot be part of a CUDA graph: a replay would repeat the GPU's part of it "
            "alone. Call it outside of torch.cuda.graph() and make_graphed_callables(); compile "
            'functional collectives without mode="reduce-overhead" and mode="max-autotune"'
        )


def _is_captured(device: torch.device) -> bool:
    if torch.cuda.current_device() == device.index:  # which spares most calls the guard
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def reached(event: torch.cuda.Event) -> bool:
    """Whether everything before it is done."""
    return bool(event.query())  # type: ignore[no-untyped-call,unused-ignore]
