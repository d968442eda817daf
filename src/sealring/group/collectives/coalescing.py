"""Several collectives in one call, and torch's coalescing manager.

Each is a collective of its own: they run back to back without coming up for air, which is all that
there is to gain over links of our own. Collectives of one group finish in order, and one that fails
closes the group, so the last one's work speaks for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from sealring.errors import Unsupported
from sealring.group.collectives.calling import Results
from sealring.group.collectives.copying import Copying
from sealring.group.collectives.reducing import Reducing


class Coalescing(Reducing, Copying):
    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        _need_some(tensors, "all_reduce_coalesced")
        return [self._all_reduce(tensor, opts, result=tensors) for tensor in tensors][-1]

    def allgather_coalesced(
        self,
        output_lists: list[list[torch.Tensor]],
        input_list: list[torch.Tensor],
        opts: Any = None,
    ) -> dist.Work:
        """output_lists[r] takes what rank r gives, tensor by tensor."""
        _need_some(input_list, "all_gather_coalesced")
        if len(output_lists) != self._world:
            raise Unsupported(
                f"all_gather_coalesced needs {self._world} output lists, not {len(output_lists)}"
            )
        for outputs in output_lists:
            _same_number(outputs, input_list, "all_gather_coalesced")
        works = []
        result = [tensor for outputs in output_lists for tensor in outputs]
        for index, source in enumerate(input_list):
            results = Results()
            own = [outputs[index] for outputs in output_lists]
            regions = [results.memory(tensor) for tensor in own]
            works.append(self._all_gather(regions, source, opts, results, result=result))
        return works[-1]

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        _need_some(inputs, "all_gather_into_tensor_coalesced")
        _same_number(outputs, inputs, "all_gather_into_tensor_coalesced")
        pairs = zip(outputs, inputs, strict=True)
        return _speaks_for(outputs, [self._allgather_base(*pair, opts) for pair in pairs])

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        _need_some(inputs, "reduce_scatter_tensor_coalesced")
        _same_number(outputs, inputs, "reduce_scatter_tensor_coalesced")
        pairs = zip(outputs, inputs, strict=True)
        return _speaks_for(outputs, [self._reduce_scatter_base(*pair, opts) for pair in pairs])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]


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
