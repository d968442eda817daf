"""The same calls on a sealring group and on a Gloo group of the same processes."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist

Call = Callable[[dist.ProcessGroup], Any]


@contextmanager
def both(world: int) -> Iterator[dict[str, dist.ProcessGroup]]:
    """Two groups of all workers, for as long as the block lasts."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    groups: dict[str, Any] = {
        name: dist.new_group(
            list(range(world)), backend=name, timeout=timedelta(seconds=60), group_desc=name
        )
        for name in ("sealring", "gloo")
    }
    try:
        yield groups
    finally:
        for group in groups.values():
            dist.destroy_process_group(group)
        # Gloo's descriptors go with the group: the next test may count them.
        del group
        groups.clear()
        torch._dynamo.reset()
        gc.collect()


def outcome(call: Call, group: dist.ProcessGroup) -> tuple[str, Any]:
    """The call's result, with tensors as lists, or the type and text of the error it raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return "value", plain(call(group))
        except Exception as error:
            return type(error).__name__, str(error)


def gloo_lacks(outcome: tuple[str, Any]) -> bool:
    """Gloo of torch 2.11 has no all_to_all of lists."""
    return outcome == ("RuntimeError", "Backend gloo does not support alltoall")


def plain(value: Any) -> Any:
    """The value in a form that can be compared and sent to the test's process."""
    if isinstance(value, torch.Tensor):
        return ["tensor", str(value.dtype), list(value.shape), value.detach().tolist()]
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value
