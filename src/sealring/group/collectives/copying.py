"""broadcast, barrier, all_gather, gather and scatter: bytes that arrive as they left."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from sealring.engine.cpu import Collective
from sealring.errors import Unsupported
from sealring.group import arguments
from sealring.group.arguments import contiguous, one, slot
from sealring.group.collectives import shapes
from sealring.group.collectives.calling import Calling, Results
from sealring.schedule import Operation


class Copying(Calling):
    def broadcast(  # type: ignore[override]
        self, tensors: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        tensor = one(tensors, "broadcast")
        arguments.check_tensor(tensor, "broadcast")
        root = shapes.root_of(opts, self._world, "broadcast")
        results = Results()
        memory = results.memory(tensor)
        _, size = slot(memory)
        return self._submit(
            "sealring::broadcast",
            Collective(
                Operation.BROADCAST,
                self._choose(Operation.BROADCAST, size, memory.device),
                [slot(memory)],
                size,
                arguments.moved_dtype(tensor),
                root=root,
            ),
            opts,
            result=tensors,
            keep=(memory,),
            on_success=results.copy_back,
        )

    def barrier(self, opts: Any = None) -> dist.Work:
        nothing = torch.empty(0, dtype=torch.uint8)
        return self._submit(
            "sealring::barrier",
            Collective(
                Operation.BARRIER,
                self._choose(Operation.BARRIER, 0, nothing.device),
                [slot(nothing)],
                0,
                arguments.moved_dtype(nothing),
            ),
            opts,
            result=[],
            keep=(nothing,),
        )

    def allgather(  # type: ignore[override]
        self,
        output_tensors: list[list[torch.Tensor]],
        input_tensors: list[torch.Tensor],
        opts: Any = None,
    ) -> dist.Work:
        source = one(input_tensors, "all_gather")
        outputs = shapes.one_list(output_tensors, self._world, "all_gather")
        results = Results()
        memory = [results.memory(tensor) for tensor in outputs]
        return self._all_gather(memory, source, opts, results, result=outputs)

    def _allgather_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        shapes.check_times_world(output, input, self._world, "all_gather", "output")
        arguments.check_tensor(output, "all_gather")
        results = Results()
        parts = shapes.parts_of(results.memory(output), self._world)
        return self._all_gather(parts, input, opts, results, result=[output])

    all_gather_single = _allgather_base

    def _all_gather(
        self,
        regions: list[torch.Tensor],
        source: torch.Tensor,
        opts: Any,
        results: Results,
        *,
        result: list[torch.Tensor],
    ) -> dist.Work:
        shapes.check_alike([source, *regions], source, "all_gather")
        # A rank may gather in place: its input already is its part of the output.
        own = contiguous(source)
        return self._submit(
            "sealring::all_gather",
            self._gathering(regions, own),
            opts,
            result=result,
            keep=(own, *regions),
            on_success=results.copy_back,
        )

    def gather(  # type: ignore[override]
        self,
        output_tensors: list[list[torch.Tensor]],
        input_tensors: list[torch.Tensor],
        opts: Any = None,
    ) -> dist.Work:
        source = one(input_tensors, "gather")
        outputs = self._at_root_only(output_tensors, opts, "gather", "receives")
        shapes.check_alike([source, *outputs], source, "gather")
        results = Results()
        memory = [results.memory(tensor) for tensor in outputs]
        return self._rooted(
            Operation.GATHER, memory, contiguous(source), opts, results, result=outputs
        )

    def scatter(  # type: ignore[override]
        self,
        output_tensors: list[torch.Tensor],
        input_tensors: list[list[torch.Tensor]],
        opts: Any = None,
    ) -> dist.Work:
        output = one(output_tensors, "scatter")
        inputs = self._at_root_only(input_tensors, opts, "scatter", "sends")
        shapes.check_alike([output, *inputs], output, "scatter")
        results = Results()
        memory = results.memory(output)
        parts = [contiguous(tensor) for tensor in inputs]
        return self._rooted(Operation.SCATTER, parts, memory, opts, results, result=[output])

    def _at_root_only(
        self, lists: list[list[torch.Tensor]], opts: Any, operation: str, does: str
    ) -> list[torch.Tensor]:
        """The root's list of one tensor per rank; nobody else may give one."""
        if self._rank == shapes.root_of(opts, self._world, operation):
            return shapes.one_list(lists, self._world, operation)
        if any(lists):
            raise Unsupported(f"{operation}: only the root {does} a list of tensors")
        return []

    def _rooted(
        self,
        operation: Operation,
        parts: list[torch.Tensor],
        own: torch.Tensor,
        opts: Any,
        results: Results,
        *,
        result: list[torch.Tensor],
    ) -> dist.Work:
        """Slots as schedule/direct.py has them: the root's parts before its own tensor."""
        name = operation.name.lower()
        _, size = slot(own)
        return self._submit(
            f"sealring::{name}",
            Collective(
                operation,
                self._choose(operation, size, own.device),
                [slot(tensor) for tensor in (*parts, own)],
                size * self._world,
                arguments.moved_dtype(own),
                root=shapes.root_of(opts, self._world, name),
            ),
            opts,
            result=result,
            keep=(*parts, own),
            on_success=results.copy_back,
        )
