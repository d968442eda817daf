"""all_to_all: every rank sends a message to every other. Only its two ends know its length."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllToAllOptions

from sealring.core.engine.collective import Collective
from sealring.core.group import arguments
from sealring.core.group.arguments import contiguous
from sealring.core.group.collectives import shapes
from sealring.core.group.collectives.calling import Calling, Results
from sealring.core.group.entry import define_single, entry
from sealring.core.group.memory import Slot, slot
from sealring.core.schedule import Operation
from sealring.errors import Unsupported


class Exchanging(Calling):
    @entry(list, AllToAllOptions, 3)
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
        _check([*input_tensors, *output_tensors])
        sent = [contiguous(tensor) for tensor in input_tensors]
        read = [slot(tensor) for tensor in sent]
        results = Results("all_to_all")
        held, written = results.of(output_tensors, read)
        return self._all_to_all(written, read, (*sent, *held), results, opts, result=output_tensors)

    def _all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> dist.Work:
        """Split sizes count rows, the tensors' first dimension. An empty list means equal
        splits."""
        _check([input, output])
        sent = contiguous(input)
        read = slot(sent)
        results = Results("all_to_all")
        (held,), (written,) = results.of([output], [read])
        return self._all_to_all(
            self._split(output, written, output_split_sizes, "output"),
            self._split(input, read, input_split_sizes, "input"),
            (sent, held),
            results,
            opts,
            result=[output],
        )

    def _split(self, tensor: torch.Tensor, whole: Slot, sizes: list[int], name: str) -> list[Slot]:
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
        address, total = whole
        row = total // rows if rows else 0
        slots = []
        for size in sizes:
            slots.append((address, size * row))
            address += size * row
        return slots

    def _all_to_all(
        self,
        written: list[Slot],
        read: list[Slot],
        keep: tuple[torch.Tensor, ...],
        results: Results,
        opts: Any,
        *,
        result: list[torch.Tensor],
    ) -> dist.Work:
        (_, kept), (_, expected) = read[self._rank], written[self._rank]
        own = keep[0]
        if kept != expected:
            each = own.element_size()
            raise Unsupported(
                f"all_to_all: rank {self._rank} keeps {kept // each} elements for itself but "
                f"expects {expected // each}"
            )
        return self._submit(
            "sealring::all_to_all",
            Collective(
                Operation.ALL_TO_ALL,
                self._choose(Operation.ALL_TO_ALL, kept, own.device),
                [*read, *written],
                None,
                arguments.moved_dtype(own),
            ),
            opts,
            result=result,
            keep=keep,
            on_success=results.copy_back,
        )


define_single(
    Exchanging,
    "all_to_all_single",
    Exchanging._all_to_all_single,
    torch.Tensor,
    AllToAllOptions,
    5,
)


def _check(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        arguments.check_tensor(tensor, "all_to_all")
        shapes.check_dtype(tensor, tensors[0], "all_to_all")
