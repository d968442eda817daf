"""Whether the tensors of a call fit together, and the parts they fall into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sealring.core.group import arguments
from sealring.errors import Unsupported


def root_of(opts: Any, world: int, operation: str) -> int:
    root = int(opts.rootRank) if opts is not None else 0
    if not 0 <= root < world:
        raise Unsupported(f"{operation}: the root {root} is not one of the group's {world} ranks")
    return root


def root_tensor(opts: Any, count: int) -> int:
    """Which of the root's tensors is broadcast."""
    index = int(opts.rootTensor) if opts is not None else 0
    if not 0 <= index < count:
        raise Unsupported(f"broadcast: there is no tensor {index} among the {count} given")
    return index


def check_alike(tensors: Sequence[torch.Tensor], like: torch.Tensor, operation: str) -> None:
    """All of one size and dtype, and dense."""
    for tensor in tensors:
        arguments.check_tensor(tensor, operation)
        if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
            raise Unsupported(
                f"{operation}: all tensors must have one size and dtype; got {tensor.numel()} "
                f"elements of {tensor.dtype} beside {like.numel()} of {like.dtype}"
            )


def check_dtype(tensor: torch.Tensor, like: torch.Tensor, operation: str) -> None:
    if tensor.dtype != like.dtype:
        raise Unsupported(
            f"{operation}: tensors of {tensor.dtype} and {like.dtype}; all must have one dtype"
        )


def one_list(lists: list[list[torch.Tensor]], world: int, operation: str) -> list[torch.Tensor]:
    """The only list of those that c10d made for several GPUs per process: one tensor per rank."""
    if len(lists) != 1 or len(lists[0]) != world:
        raise Unsupported(f"{operation} needs one list of {world} tensors, one per rank")
    return lists[0]


def check_times_world(
    whole: torch.Tensor, part: torch.Tensor, world: int, operation: str, name: str
) -> None:
    if whole.numel() != part.numel() * world:
        raise Unsupported(
            f"{operation}: the {name} has {whole.numel()} elements; {world} ranks with "
            f"{part.numel()} each need {part.numel() * world}"
        )
