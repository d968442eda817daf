"""Several tensors in the place of one: c10d's form for several devices per process.

torch.distributed itself always passes lists of one. A list of several is one call on tensors that
are first brought together on this rank, and filled from the result at the end, as Gloo does it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from sealring.core.group.collectives.shapes import check_alike
from sealring.core.group.memory import extent
from sealring.errors import Unsupported

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
    """What this rank gives to a reduction: the reduction of its own tensors."""
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
    """Every tensor becomes the result."""
    for tensor in tensors:
        extent(tensor)
        tensor.copy_(result.view_as(tensor))


def fill_lists(lists: Sequence[Sequence[torch.Tensor]], parts: torch.Tensor) -> None:
    """Every list becomes the parts, one after the other."""
    for outputs in lists:
        for output, part in zip(outputs, parts, strict=True):
            extent(output)
            output.copy_(part.view_as(output))


def check_lists(
    lists: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], world: int
) -> None:
    """One list per input, with one tensor for each input of each rank."""
    check_alike([*inputs, *(tensor for each in lists for tensor in each)], inputs[0], "all_gather")
    if len(lists) != len(inputs) or any(len(each) != world * len(inputs) for each in lists):
        raise Unsupported(
            f"all_gather of {len(inputs)} tensors per rank needs {len(inputs)} lists of "
            f"{world * len(inputs)} output tensors"
        )
