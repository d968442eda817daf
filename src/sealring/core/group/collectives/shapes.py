"""Checks that the tensors of a call fit together, and handles lists of several tensors per rank.

c10d's methods take lists, for several devices per process; torch.distributed always passes lists of
one tensor. As with Gloo, a list of several tensors is one call: this rank first combines its
tensors, and at the end fills all of them from the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from sealring.core.group import arguments
from sealring.core.group.memory import extent
from sealring.errors import Unsupported


def root_of(opts: Any, world: int, operation: str) -> int:
    root = int(opts.rootRank) if opts is not None else 0
    if not 0 <= root < world:
        raise Unsupported(f"{operation}: the root {root} is not one of the group's {world} ranks")
    return root


def root_tensor(opts: Any, count: int) -> int:
    """The index of the root's tensor that is broadcast."""
    index = int(opts.rootTensor) if opts is not None else 0
    if not 0 <= index < count:
        raise Unsupported(f"broadcast: there is no tensor {index} among the {count} given")
    return index


def check_alike(tensors: Sequence[torch.Tensor], like: torch.Tensor, operation: str) -> None:
    """Raises Unsupported unless all tensors are dense and have the size and dtype of `like`."""
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
    """Returns the only list of `lists`, which must have one tensor per rank."""
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


# ---- several tensors in the place of one


_FOLDS: Final[dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


def folded(tensors: Sequence[torch.Tensor], op: Any, operation: str) -> torch.Tensor:
    """Reduces this rank's own tensors to the one that it gives to the collective."""
    check_alike(tensors, tensors[0], operation)
    red_op = op.op if hasattr(op, "op") else op
    fold = _FOLDS.get(red_op)
    if fold is None:
        raise Unsupported(
            f"{operation}: {red_op.name} of {len(tensors)} tensors per rank is not supported. "
            "Call it with one tensor at a time."
        )
    result = tensors[0].detach().clone()
    for tensor in tensors[1:]:
        result = fold(result, tensor.detach())
    return result


def fill(tensors: Sequence[torch.Tensor], result: torch.Tensor) -> None:
    """Copies the result into every tensor."""
    for tensor in tensors:
        extent(tensor)
        tensor.copy_(result.view_as(tensor))


def fill_lists(lists: Sequence[Sequence[torch.Tensor]], parts: torch.Tensor) -> None:
    """Copies the parts into the tensors of every list, in order."""
    for outputs in lists:
        for output, part in zip(outputs, parts, strict=True):
            extent(output)
            output.copy_(part.view_as(output))


def check_lists(
    lists: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], world: int
) -> None:
    """Checks that there is one list per input, with one tensor for each input of each rank."""
    check_alike([*inputs, *(tensor for each in lists for tensor in each)], inputs[0], "all_gather")
    if len(lists) != len(inputs) or any(len(each) != world * len(inputs) for each in lists):
        raise Unsupported(
            f"all_gather of {len(inputs)} tensors per rank needs {len(inputs)} lists of "
            f"{world * len(inputs)} output tensors"
        )
