"""torch's streams and events, which have no types of their own."""

from __future__ import annotations

import torch


def new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call,no-any-return,unused-ignore]


def new_event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call,no-any-return,unused-ignore]


def reached(event: torch.cuda.Event) -> bool:
    """Whether everything before it is done."""
    return bool(event.query())  # type: ignore[no-untyped-call,unused-ignore]
