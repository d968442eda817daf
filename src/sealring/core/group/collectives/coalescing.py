"""Several collectives in one call, and torch's coalescing manager.

Each is run as a separate collective, one directly after the other; merging them would gain nothing
more. Collectives of a group finish in order, and one that fails closes the group. So the work of
the last one is returned for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    ReduceScatterOptions,
)

from sealring.core.group import arguments
from sealring.core.group.collectives import shapes
from sealring.core.group.collectives.calling import Results
from sealring.core.group.collectives.copying import Copying
from sealring.core.group.collectives.reducing import Reducing
from sealring.core.group.entry import define_single, entry
from sealring.core.group.memory import clash, extent
from sealring.errors import Unsupported


class Coalescing(Reducing, Copying):
    @entry(list, AllreduceCoalescedOptions, 2)
    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """All tensors are read before the first is written, if some of them share memory."""
        _need_some(tensors, "all_reduce_coalesced")
        for tensor in tensors:
            arguments.check_tensor(tensor, "all_reduce_coalesced")
        calls = [(tensor, Results("all_reduce_coalesced")) for tensor in tensors]
        shared = clash([extent(tensor) for tensor in tensors], [])
        if shared or not all(map(arguments.is_one_run, tensors)):
            calls = [(results.snapshot(tensor), results) for tensor, results in calls]
        works = [self._all_reduce(each, results, opts, result=tensors) for each, results in calls]
        return works[-1]

    @entry(list, AllgatherOptions, 3)
    def allgather_coalesced(
        self,
        output_lists: list[list[torch.Tensor]],
        input_list: list[torch.Tensor],
        opts: Any = None,
    ) -> dist.Work:
        """output_lists[r] gets the tensors of rank r, in their order."""
        _need_some(input_list, "all_gather_coalesced")
        if len(output_lists) != self._world:
            raise Unsupported(
                f"all_gather_coalesced needs {self._world} output lists, not {len(output_lists)}"
            )
        for outputs in output_lists:
            _same_number(outputs, input_list, "all_gather_coalesced")
        calls = []
        for index, source in enumerate(input_list):
            outputs = [each[index] for each in output_lists]
            shapes.check_alike([source, *outputs], source, "all_gather_coalesced")
            calls.append((outputs, source))
        written = [tensor for outputs, _ in calls for tensor in outputs]
        read = _before_any_is_written(input_list, written)
        result = output_lists if len(output_lists) > 1 else output_lists[0]
        works = [
            self._all_gather(outputs, source, Results("all_gather_coalesced"), opts, result=result)
            for (outputs, _), source in zip(calls, read, strict=True)
        ]
        return works[-1]

    def _all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        _need_some(inputs, "all_gather_into_tensor_coalesced")
        _same_number(outputs, inputs, "all_gather_into_tensor_coalesced")
        pairs = zip(outputs, _before_any_is_written(inputs, outputs), strict=True)
        return _speaks_for(outputs, [self._all_gather_single(*pair, opts) for pair in pairs])

    def _reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        _need_some(inputs, "reduce_scatter_tensor_coalesced")
        _same_number(outputs, inputs, "reduce_scatter_tensor_coalesced")
        pairs = zip(outputs, _before_any_is_written(inputs, outputs), strict=True)
        return _speaks_for(outputs, [self._reduce_scatter_single(*pair, opts) for pair in pairs])


define_single(
    Coalescing,
    "all_gather_single_coalesced",
    Coalescing._all_gather_single_coalesced,
    list,
    AllgatherOptions,
    3,
)
define_single(
    Coalescing,
    "reduce_scatter_single_coalesced",
    Coalescing._reduce_scatter_single_coalesced,
    list,
    ReduceScatterOptions,
    3,
)


def _before_any_is_written(
    inputs: list[torch.Tensor], outputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Returns the inputs, or copies of them if a collective could write to a later one's input."""
    for tensor in (*inputs, *outputs):
        arguments.check_tensor(tensor, "a coalesced call")
    if len(inputs) == 1 or not clash([extent(t) for t in outputs], [extent(t) for t in inputs]):
        return inputs
    return [tensor.detach().clone() for tensor in inputs]


def _speaks_for(result: list[torch.Tensor], works: list[Any]) -> dist.Work:
    last = works[-1]
    last.stand_for(result)
    return last  # type: ignore[no-any-return]


def _need_some(tensors: Sequence[torch.Tensor], operation: str) -> None:
    if not tensors:
        raise Unsupported(f"{operation} needs at least one tensor")


def _same_number(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], operation: str
) -> None:
    if len(outputs) != len(inputs):
        raise Unsupported(
            f"{operation}: {len(outputs)} outputs do not go with {len(inputs)} inputs"
        )
