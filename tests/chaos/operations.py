"""The operations that traffic is made of. A new one is one entry here.

Its arrays and its program come from tests/engine/cases.py, as for every test of the engine; the
entry says how torch is asked for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from sealring.engine.datatypes import DType, ReduceKind
from sealring.group.arguments import DTYPES
from sealring.schedule import Operation
from tests.engine.cases import Array, Case

Start = Callable[[Case, list[torch.Tensor], dict[str, Any]], Any]
"""(case, one tensor per slot, group and async_op) -> torch's Work, or None when it is done."""


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


def _barrier(case: Case, slots: list[torch.Tensor], how: dict[str, Any]) -> Any:
    return dist.barrier(**how)


@dataclass(frozen=True, slots=True)
class Entry:
    start: Start
    rooted: bool = False


OPERATIONS: Final[dict[Operation, Entry]] = {
    Operation.ALL_REDUCE: Entry(_all_reduce),
    Operation.REDUCE_SCATTER: Entry(_reduce_scatter),
    Operation.ALL_GATHER: Entry(_all_gather),
    Operation.BROADCAST: Entry(_broadcast, rooted=True),
    Operation.BARRIER: Entry(_barrier),
}

_TORCH: Final = {dtype: name for name, dtype in DTYPES.items()} | {
    DType.BYTES: torch.float8_e4m3fn  # one that sealring moves and does not reduce
}


def as_tensor(array: Array, dtype: DType) -> torch.Tensor:
    """The same memory, as torch's type of it."""
    same_width = array.view(np.uint8) if dtype is DType.BOOL else array
    return torch.from_numpy(same_width).view(_TORCH[dtype])


def _reduce_op(case: Case) -> Any:
    if case.kind is ReduceKind.PREMUL_SUM:
        return dist._make_nccl_premul_sum(case.factor)
    return getattr(dist.ReduceOp, case.kind.name)
