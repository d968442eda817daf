"""all_to_all: a message from every rank to every other, each of a length that its two ends know."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from sealring.engine.cpu import Collective
from sealring.errors import Unsupported
from sealring.group import arguments
from sealring.group.arguments import contiguous, slot
from sealring.group.collectives.calling import Calling, Results
from sealring.schedule import Operation


class Exchanging(Calling):
    def alltoall(
        self,
        output_tensors: list[torch.Tensor],
        input_tensors: list[torch.Tensor],
        opts: Any = None,
    ) -> dist.Work:
        for name, tensors in (("output", output_tensors), ("input", input_tensors)):
            if len(tensors) != self._world:
                raise Unsupported(
                    f"all_to_all needs {self._world} {name} tensors, one per rank, "
                    f"not {len(tensors)}"
                )
        results = Results()
        outputs = [results.memory(tensor) for tensor in output_tensors]
        inputs = [contiguous(tensor) for tensor in input_tensors]
        return self._all_to_all(outputs, inputs, opts, results, result=output_tensors)

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> dist.Work:
        """Splits are counted in rows, the tensors' first dimension; none means equal ones."""
        arguments.check_tensor(output, "all_to_all")
        arguments.check_tensor(input, "all_to_all")
        results = Results()
        outputs = self._split(results.memory(output), output_split_sizes, "output")
        inputs = self._split(contiguous(input), input_split_sizes, "input")
        return self._all_to_all(outputs, inputs, opts, results, result=[output])

    all_to_all_single = alltoall_base  # type: ignore[assignment]

    def _split(self, tensor: torch.Tensor, sizes: list[int], name: str) -> list[torch.Tensor]:
        rows = tensor.size(0) if tensor.dim() else 1
        if not sizes:
            if rows % self._world:
                raise Unsupported(
                    f"all_to_all: the {name}'s {rows} rows cannot be split equally between "
                    f"{self._world} ranks; give {name}_split_sizes"
                )
            sizes = [rows // self._world] * self._world
        if len(sizes) != self._world or min(sizes) < 0 or sum(sizes) != rows:
            raise Unsupported(
                f"all_to_all: {name}_split_sizes {list(sizes)} are not {self._world} numbers of "
                f"rows that make up the {name}'s {rows}"
            )
        if not tensor.dim():
            return [tensor.view(-1)]
        return list(torch.split(tensor, list(sizes)))

    def _all_to_all(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: Any,
        results: Results,
        *,
        result: list[torch.Tensor],
    ) -> dist.Work:
        dtype = inputs[0].dtype
        for tensor in (*inputs, *outputs):
            arguments.check_tensor(tensor, "all_to_all")
            if tensor.dtype != dtype:
                raise Unsupported(
                    f"all_to_all: tensors of {tensor.dtype} and {dtype}; all must have one dtype"
                )
        kept, received = inputs[self._rank], outputs[self._rank]
        if kept.numel() != received.numel():
            raise Unsupported(
                f"all_to_all: rank {self._rank} keeps {kept.numel()} elements for itself but "
                f"expects {received.numel()}"
            )
        return self._submit(
            "sealring::all_to_all",
            Collective(
                Operation.ALL_TO_ALL,
                self._choose(Operation.ALL_TO_ALL, slot(kept)[1], kept.device),
                [slot(tensor) for tensor in (*inputs, *outputs)],
                None,
                arguments.moved_dtype(inputs[0]),
            ),
            opts,
            result=result,
            keep=(*inputs, *outputs),
            on_success=results.copy_back,
        )
