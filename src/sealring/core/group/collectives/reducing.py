"""all_reduce, reduce and reduce_scatter."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, ReduceOptions, ReduceScatterOptions

from sealring.core.engine.collective import Collective, ReduceKind
from sealring.core.group import arguments, sparse
from sealring.core.group.arguments import contiguous, one
from sealring.core.group.collectives import shapes
from sealring.core.group.collectives.calling import Calling, Key, Results
from sealring.core.group.entry import define_single, entry
from sealring.core.group.memory import Slot, parts, slot
from sealring.core.schedule import Operation, chunks, cuts_into_chunks


class Reducing(Calling):
    @entry(list, AllreduceOptions, 2)
    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        key: Key | None = None
        if len(tensors) == 1 and opts is not None:
            tensor = tensors[0]
            key = "all_reduce", tensor.dtype, tensor.numel(), tensor.layout, _code(opts.reduceOp)
            if (work := self._run_prepared(key, tensor, tensors, opts)) is not None:
                return work
        if len(tensors) > 1:
            result = shapes.folded(tensors, _op(opts), "all_reduce")
            results = Results("all_reduce")
            results.then(functools.partial(shapes.fill, tensors, result))
            return self._all_reduce(result, results, opts, result=tensors)
        tensor = one(tensors, "all_reduce")
        if tensor.layout is not torch.strided:
            return self._sparse_all_reduce(tensor, opts, result=tensors)
        arguments.check_tensor(tensor, "all_reduce")
        return self._all_reduce(tensor, Results("all_reduce"), opts, result=tensors, key=key)

    def _sparse_all_reduce(
        self, tensor: torch.Tensor, opts: Any, *, result: list[torch.Tensor]
    ) -> dist.Work:
        sparse.check(tensor, _op(opts))
        return self._submit(
            "sealring::all_reduce",
            sparse.all_reduce(tensor, self._world, self._gathering, self.engine.require_agreement),
            opts,
            result=result,
            keep=(tensor,),
            called=Operation.ALL_REDUCE,
        )

    def _all_reduce(
        self,
        tensor: torch.Tensor,
        results: Results,
        opts: Any,
        *,
        result: list[torch.Tensor],
        key: Key | None = None,
    ) -> dist.Work:
        """`key` identifies like calls, which can be prepared; None if this call cannot be."""
        dtype, kind, factor = arguments.reduction(_op(opts), tensor, "all_reduce")
        memory, (address, total) = results.of_one(tensor)
        algorithm = self._choose(Operation.ALL_REDUCE, total, memory.device)
        slots = [(address, total)]
        if cuts_into_chunks(Operation.ALL_REDUCE, algorithm):
            cuts = chunks(memory.numel(), self._world, memory.element_size())
            slots = [(address + offset, length) for offset, length in cuts]
        collective = Collective(Operation.ALL_REDUCE, algorithm, slots, total, dtype, kind, factor)
        if key is not None and memory is tensor and kind is not ReduceKind.PREMUL_SUM:
            self._prepare(key, collective, tensor)
        return self._submit(
            "sealring::all_reduce",
            collective,
            opts,
            result=result,
            keep=(memory,),
            on_success=results.copy_back,
        )

    @entry(list, ReduceOptions, 2)
    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Writes the result to the root's tensor; the other ranks' tensors do not change."""
        tensor = one(tensors, "reduce")
        arguments.check_tensor(tensor, "reduce")
        root = shapes.root_of(opts, self._world, "reduce")
        dtype, kind, factor = arguments.reduction(_op(opts), tensor, "reduce")
        results = Results("reduce")
        if self._rank == root:
            memory, where = results.of_one(tensor)
        else:
            memory = contiguous(tensor)
            where = slot(memory)
        _, size = where
        return self._submit(
            "sealring::reduce",
            Collective(
                Operation.REDUCE,
                self._choose(Operation.REDUCE, size, memory.device),
                [where],
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

    @entry(list, ReduceScatterOptions, 3)
    def reduce_scatter(
        self,
        output_tensors: list[torch.Tensor],
        input_tensors: list[list[torch.Tensor]],
        opts: Any = None,
    ) -> dist.Work:
        output = one(output_tensors, "reduce_scatter")
        inputs = shapes.one_list(input_tensors, self._world, "reduce_scatter")
        shapes.check_alike([output, *inputs], output, "reduce_scatter")
        held = [contiguous(tensor) for tensor in inputs]
        return self._reduce_scatter(output, held, [slot(tensor) for tensor in held], opts)

    def _reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        shapes.check_times_world(input, output, self._world, "reduce_scatter", "input")
        arguments.check_tensor(input, "reduce_scatter")
        shapes.check_alike([output], output, "reduce_scatter")
        shapes.check_dtype(input, output, "reduce_scatter")
        held = contiguous(input)
        return self._reduce_scatter(output, [held], parts(slot(held), self._world), opts)

    def _reduce_scatter(
        self, output: torch.Tensor, inputs: list[torch.Tensor], read: list[Slot], opts: Any
    ) -> dist.Work:
        dtype, kind, factor = arguments.reduction(_op(opts), output, "reduce_scatter")
        results = Results("reduce_scatter")
        (memory,), (written,) = results.of([output], read)
        _, size = written
        return self._submit(
            "sealring::reduce_scatter",
            Collective(
                Operation.REDUCE_SCATTER,
                self._choose(Operation.REDUCE_SCATTER, size, memory.device),
                [*read, written],
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


define_single(
    Reducing,
    "reduce_scatter_single",
    Reducing._reduce_scatter_single,
    torch.Tensor,
    ReduceScatterOptions,
    3,
)


_REDUCE_OPS: Final = [
    *(dist.ReduceOp(op) for name, op in dist.ReduceOp.RedOpType.__members__.items()
      if name != "PREMUL_SUM"),
    dist._make_nccl_premul_sum(1.0),
]  # fmt: skip
_code: Final[Callable[[Any], object]] = (
    hash if len({hash(op) for op in _REDUCE_OPS}) == len(_REDUCE_OPS) else lambda op: op
)
"""Maps a ReduceOp to what identifies it: its hash, if torch's hashes are all different, because
comparing ReduceOps is slow compared with a small call. Otherwise the ReduceOp itself."""


def _op(opts: Any) -> Any:
    return opts.reduceOp if opts is not None else dist.ReduceOp.SUM
