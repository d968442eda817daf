"""all_reduce, reduce and reduce_scatter."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from sealring.engine.cpu import Collective
from sealring.group import arguments, sparse
from sealring.group.arguments import contiguous, one, slot
from sealring.group.collectives import shapes
from sealring.group.collectives.calling import Calling, Results
from sealring.schedule import Operation, chunks, cuts_into_chunks


class Reducing(Calling):
    def allreduce(  # type: ignore[override]
        self, tensors: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        tensor = one(tensors, "all_reduce")
        if tensor.layout is not torch.strided:
            return self._sparse_all_reduce(tensor, opts, result=tensors)
        return self._all_reduce(tensor, opts, result=tensors)

    def _sparse_all_reduce(
        self, tensor: torch.Tensor, opts: Any, *, result: list[torch.Tensor]
    ) -> dist.Work:
        sparse.check(tensor, _op(opts))
        return self._submit(
            "sealring::all_reduce",
            sparse.all_reduce(tensor, self._world, self._gathering),
            opts,
            result=result,
            keep=(tensor,),
        )

    def _all_reduce(
        self, tensor: torch.Tensor, opts: Any, *, result: list[torch.Tensor]
    ) -> dist.Work:
        arguments.check_tensor(tensor, "all_reduce")
        dtype, kind, factor = arguments.reduction(_op(opts), tensor, "all_reduce")
        results = Results()
        memory = results.memory(tensor)
        address, total = slot(memory)
        algorithm = self._choose(Operation.ALL_REDUCE, total, memory.device)
        slots = [(address, total)]
        if cuts_into_chunks(Operation.ALL_REDUCE, algorithm):
            cuts = chunks(memory.numel(), self._world, memory.element_size())
            slots = [(address + offset, length) for offset, length in cuts]
        return self._submit(
            "sealring::all_reduce",
            Collective(Operation.ALL_REDUCE, algorithm, slots, total, dtype, kind, factor),
            opts,
            result=result,
            keep=(memory,),
            on_success=results.copy_back,
        )

    def reduce(  # type: ignore[override]
        self, tensors: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """The root's tensor becomes the result; all others stay as they are."""
        tensor = one(tensors, "reduce")
        arguments.check_tensor(tensor, "reduce")
        root = shapes.root_of(opts, self._world, "reduce")
        dtype, kind, factor = arguments.reduction(_op(opts), tensor, "reduce")
        results = Results()
        memory = results.memory(tensor) if self._rank == root else contiguous(tensor)
        _, size = slot(memory)
        return self._submit(
            "sealring::reduce",
            Collective(
                Operation.REDUCE,
                self._choose(Operation.REDUCE, size, memory.device),
                [slot(memory)],
                size,
                dtype,
                kind,
                factor,
                root,
            ),
            opts,
            result=tensors,
            keep=(memory,),
            on_success=results.copy_back,
        )

    def reduce_scatter(  # type: ignore[override]
        self,
        output_tensors: list[torch.Tensor],
        input_tensors: list[list[torch.Tensor]],
        opts: Any = None,
    ) -> dist.Work:
        output = one(output_tensors, "reduce_scatter")
        inputs = shapes.one_list(input_tensors, self._world, "reduce_scatter")
        return self._reduce_scatter(output, [contiguous(t) for t in inputs], opts)

    def _reduce_scatter_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        shapes.check_times_world(input, output, self._world, "reduce_scatter", "input")
        arguments.check_tensor(input, "reduce_scatter")
        return self._reduce_scatter(output, shapes.parts_of(contiguous(input), self._world), opts)

    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]

    def _reduce_scatter(
        self, output: torch.Tensor, inputs: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        shapes.check_alike([output, *inputs], output, "reduce_scatter")
        dtype, kind, factor = arguments.reduction(_op(opts), output, "reduce_scatter")
        results = Results()
        memory = results.memory(output)
        _, size = slot(memory)
        return self._submit(
            "sealring::reduce_scatter",
            Collective(
                Operation.REDUCE_SCATTER,
                self._choose(Operation.REDUCE_SCATTER, size, memory.device),
                [slot(tensor) for tensor in (*inputs, memory)],
                size * self._world,
                dtype,
                kind,
                factor,
            ),
            opts,
            result=[output],
            keep=(*inputs, memory),
            on_success=results.copy_back,
        )


def _op(opts: Any) -> Any:
    return opts.reduceOp if opts is not None else dist.ReduceOp.SUM
