"""broadcast, barrier, all_gather, gather and scatter: collectives that copy and do not reduce."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ScatterOptions,
)

from sealring.core.engine.collective import Collective
from sealring.core.group import arguments
from sealring.core.group.arguments import contiguous, one
from sealring.core.group.collectives import shapes
from sealring.core.group.collectives.calling import Calling, Results
from sealring.core.group.entry import define_single, entry
from sealring.core.group.memory import Slot, clash, parts, slot
from sealring.core.group.work import Result
from sealring.core.schedule import Operation
from sealring.errors import Unsupported


class Copying(Calling):
    @entry(list, BroadcastOptions, 2)
    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        root = shapes.root_of(opts, self._world, "broadcast")
        results = Results("broadcast")
        if len(tensors) > 1:
            shapes.check_alike(tensors, tensors[0], "broadcast")
            tensor = tensors[shapes.root_tensor(opts, len(tensors))].detach().clone()
            results.then(functools.partial(shapes.fill, tensors, tensor))
        else:
            tensor = one(tensors, "broadcast")
            arguments.check_tensor(tensor, "broadcast")
        memory, where = results.of_one(tensor)
        _, size = where
        return self._submit(
            "sealring::broadcast",
            Collective(
                Operation.BROADCAST,
                self._choose(Operation.BROADCAST, size, memory.device),
                [where],
                size,
                arguments.moved_dtype(tensor),
                root=root,
            ),
            opts,
            result=tensors,
            keep=(memory,),
            on_success=results.copy_back,
        )

    @entry(None, BarrierOptions, 1)
    def barrier(self, opts: Any = None) -> dist.Work:
        return self._meet(opts)

    def _meet(self, opts: Any) -> dist.Work:
        nothing = torch.empty(0, dtype=torch.uint8)
        return self._submit(
            "sealring::barrier",
            Collective(
                Operation.BARRIER,
                self._choose(Operation.BARRIER, 0, nothing.device),
                [(0, 0)],
                0,
                arguments.moved_dtype(nothing),
            ),
            opts,
            result=[],
            keep=(nothing,),
        )

    @entry(list, AllgatherOptions, 3)
    def allgather(
        self,
        output_tensors: list[list[torch.Tensor]],
        input_tensors: list[torch.Tensor],
        opts: Any = None,
    ) -> dist.Work:
        if len(input_tensors) > 1:
            return self._all_gather_several(output_tensors, input_tensors, opts)
        source = one(input_tensors, "all_gather")
        outputs = shapes.one_list(output_tensors, self._world, "all_gather")
        shapes.check_alike([source, *outputs], source, "all_gather")
        return self._all_gather(outputs, source, Results("all_gather"), opts, result=outputs)

    def _all_gather_several(
        self, output_lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        shapes.check_lists(output_lists, inputs, self._world)
        own = torch.stack([tensor.detach().reshape(-1) for tensor in inputs])
        gathered = own.new_empty(self._world * len(inputs), inputs[0].numel())
        results = Results("all_gather")
        results.then(functools.partial(shapes.fill_lists, output_lists, gathered))
        written = parts(slot(gathered, written=True), self._world)
        return self._gather_into(
            own, slot(own), [gathered], written, results, opts, result=output_lists
        )

    def _all_gather(
        self,
        outputs: list[torch.Tensor],
        source: torch.Tensor,
        results: Results,
        opts: Any,
        *,
        result: Result,
    ) -> dist.Work:
        own = contiguous(source)
        read = slot(own)
        held, written = results.of(outputs, [] if own is outputs[self._rank] else [read])
        return self._gather_into(own, read, held, written, results, opts, result=result)

    def _all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        shapes.check_times_world(output, input, self._world, "all_gather", "output")
        arguments.check_tensor(output, "all_gather")
        arguments.check_tensor(input, "all_gather")
        shapes.check_dtype(output, input, "all_gather")
        results = Results("all_gather")
        own = contiguous(input)
        read = slot(own)
        held, (whole,) = results.of([output], [])
        written = parts(whole, self._world)
        # A rank may gather in place: its input may be its own part of the output.
        if read != written[self._rank] and clash([whole], [read]):
            own = own.clone()
            read = slot(own)
        return self._gather_into(own, read, held, written, results, opts, result=[output])

    def _gather_into(
        self,
        own: torch.Tensor,
        read: Slot,
        held: list[torch.Tensor],
        written: list[Slot],
        results: Results,
        opts: Any,
        *,
        result: Result,
    ) -> dist.Work:
        return self._submit(
            "sealring::all_gather",
            self._gathering(own, [*written, read]),
            opts,
            result=result,
            keep=(own, *held),
            on_success=results.copy_back,
        )

    @entry(list, GatherOptions, 3)
    def gather(
        self,
        output_tensors: list[list[torch.Tensor]],
        input_tensors: list[torch.Tensor],
        opts: Any = None,
    ) -> dist.Work:
        source = one(input_tensors, "gather")
        outputs = self._at_root_only(output_tensors, opts, "gather", "receives")
        shapes.check_alike([source, *outputs], source, "gather")
        results = Results("gather")
        own = contiguous(source)
        read = slot(own)
        held, written = results.of(outputs, [read])
        keep = (*held, own)
        return self._rooted(Operation.GATHER, keep, [*written, read], opts, results, result=outputs)

    @entry(list, ScatterOptions, 3)
    def scatter(
        self,
        output_tensors: list[torch.Tensor],
        input_tensors: list[list[torch.Tensor]],
        opts: Any = None,
    ) -> dist.Work:
        output = one(output_tensors, "scatter")
        inputs = self._at_root_only(input_tensors, opts, "scatter", "sends")
        shapes.check_alike([output, *inputs], output, "scatter")
        results = Results("scatter")
        sent = [contiguous(tensor) for tensor in inputs]
        read = [slot(tensor) for tensor in sent]
        held, written = results.of([output], read)
        keep = (*sent, *held)
        return self._rooted(
            Operation.SCATTER, keep, [*read, *written], opts, results, result=[output]
        )

    def _at_root_only(
        self, lists: list[list[torch.Tensor]], opts: Any, operation: str, does: str
    ) -> list[torch.Tensor]:
        """Returns the root's list of one tensor per rank; [] on other ranks, which may pass
        none."""
        if self._rank == shapes.root_of(opts, self._world, operation):
            return shapes.one_list(lists, self._world, operation)
        if any(lists):
            raise Unsupported(f"{operation}: only the root {does} a list of tensors")
        return []

    def _rooted(
        self,
        operation: Operation,
        keep: tuple[torch.Tensor, ...],
        slots: list[Slot],
        opts: Any,
        results: Results,
        *,
        result: list[torch.Tensor],
    ) -> dist.Work:
        """`slots` are in the order of core/schedule/direct.py: the root's parts, then its
        tensor."""
        name = operation.name.lower()
        own = keep[-1]
        _, size = slots[-1]
        return self._submit(
            f"sealring::{name}",
            Collective(
                operation,
                self._choose(operation, size, own.device),
                slots,
                size * self._world,
                arguments.moved_dtype(own),
                root=shapes.root_of(opts, self._world, name),
            ),
            opts,
            result=result,
            keep=keep,
            on_success=results.copy_back,
        )


define_single(
    Copying, "all_gather_single", Copying._all_gather_single, torch.Tensor, AllgatherOptions, 3
)
