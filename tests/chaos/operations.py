"""The operations that traffic uses. A new operation is one entry here.

Its arrays and its program come from core/engine/cases.py, as in every test of the engine. The entry
says how to ask torch for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from sealring.core.engine.collective import DType, ReduceKind
from sealring.core.group.arguments import DTYPES
from sealring.core.schedule import Operation
from tests.chaos.messages import Message, What
from tests.core.engine.cases import Array, Case

Start = Callable[[Case, list[torch.Tensor], dict[str, Any]], Any]
"""Starts a case on tensors, one per slot; returns torch's Work, or None if it is done."""


def _all_reduce(case: Case, slots: list[torch.Tensor], how: dict[str, Any]) -> Any:
    return dist.all_reduce(slots[0], op=_reduce_op(case), **how)


def _reduce_scatter(case: Case, slots: list[torch.Tensor], how: dict[str, Any]) -> Any:
    *parts, output = slots
    return dist.reduce_scatter(output, parts, op=_reduce_op(case), **how)


def _all_gather(case: Case, slots: list[torch.Tensor], how: dict[str, Any]) -> Any:
    *outputs, own = slots
    return dist.all_gather(outputs, own, **how)


def _broadcast(case: Case, slots: list[torch.Tensor], how: dict[str, Any]) -> Any:
    return dist.broadcast(slots[0], group_src=case.root, **how)


def _reduce(case: Case, slots: list[torch.Tensor], how: dict[str, Any]) -> Any:
    return dist.reduce(slots[0], group_dst=case.root, op=_reduce_op(case), **how)


def _gather(case: Case, slots: list[torch.Tensor], how: dict[str, Any]) -> Any:
    *parts, own = slots
    return dist.gather(own, parts or None, group_dst=case.root, **how)


def _scatter(case: Case, slots: list[torch.Tensor], how: dict[str, Any]) -> Any:
    *parts, own = slots
    return dist.scatter(own, parts or None, group_src=case.root, **how)


def _all_to_all(case: Case, slots: list[torch.Tensor], how: dict[str, Any]) -> Any:
    half = len(slots) // 2
    return dist.all_to_all(slots[half:], slots[:half], **how)


def _barrier(case: Case, slots: list[torch.Tensor], how: dict[str, Any]) -> Any:
    return dist.barrier(**how)


OPERATIONS: Final[dict[Operation, Start]] = {
    Operation.ALL_REDUCE: _all_reduce,
    Operation.REDUCE_SCATTER: _reduce_scatter,
    Operation.ALL_GATHER: _all_gather,
    Operation.BROADCAST: _broadcast,
    Operation.BARRIER: _barrier,
    Operation.REDUCE: _reduce,
    Operation.GATHER: _gather,
    Operation.SCATTER: _scatter,
    Operation.ALL_TO_ALL: _all_to_all,
}


def start(
    what: What, slots: list[torch.Tensor], rank: int, group: Any, async_op: bool
) -> list[Any]:
    """Starts one rank's part of a call; returns torch's works, or none if it is done already."""
    if isinstance(what, Case):
        how = {"group": group, "async_op": async_op}
        work = OPERATIONS[what.operation](what, slots, how)
        return [] if work is None else [work]
    if isinstance(what, Message):
        if rank == what.sender:
            return [dist.isend(slots[0], group=group, tag=what.tag, group_dst=what.receiver)]
        source = None if what.from_anyone else what.sender
        return [dist.irecv(slots[0], group=group, tag=what.tag, group_src=source)]
    others = [other for other in range(dist.get_world_size(group)) if other != rank]
    nothing = torch.empty(0)
    return [
        *(dist.isend(nothing, group=group, tag=what.tag, group_dst=other) for other in others),
        *(dist.irecv(nothing, group=group, tag=what.tag, group_src=other) for other in others),
    ]


_TORCH: Final = {dtype: name for name, dtype in DTYPES.items()} | {
    DType.BYTES: torch.float8_e4m3fn  # a type that sealring moves and does not reduce
}


def as_tensor(array: Array, dtype: DType) -> torch.Tensor:
    """Returns the same memory as a tensor of this type."""
    same_width = array.view(np.uint8) if dtype is DType.BOOL else array
    return torch.from_numpy(same_width).view(_TORCH[dtype])


def _reduce_op(case: Case) -> Any:
    if case.kind is ReduceKind.PREMUL_SUM:
        return dist._make_nccl_premul_sum(case.factor)
    return getattr(dist.ReduceOp, case.kind.name)
