"""What every collective needs: an algorithm, the queue, and the result where the user wants it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from sealring.engine.cpu import Collective
from sealring.errors import Unsupported
from sealring.group import arguments
from sealring.group.arguments import contiguous, slot
from sealring.schedule import Algorithm, Operation


class Calling(dist.ProcessGroup):
    """The part of SealedProcessGroup that the collectives stand on."""

    _rank: int
    _world: int

    def _choose(self, operation: Operation, nbytes: int) -> Algorithm:
        raise NotImplementedError

    def _gathering(self, regions: list[torch.Tensor], own: torch.Tensor) -> Collective:
        """The all_gather of one tensor per rank, all of one size, into contiguous memory."""
        _, size = slot(own)
        return Collective(
            Operation.ALL_GATHER,
            self._choose(Operation.ALL_GATHER, size),
            [slot(tensor) for tensor in (*regions, own)],
            size * self._world,
            arguments.moved_dtype(own),
        )

    def _submit(
        self,
        name: str,
        collectives: Collective | Iterable[Collective],
        opts: Any,
        *,
        result: list[torch.Tensor],
        keep: tuple[torch.Tensor, ...],
        on_success: Callable[[], None] | None = None,
    ) -> dist.Work:
        raise NotImplementedError


class Results:
    """Memory that a collective writes: the user's own where it is one run, else a copy of it."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def memory(self, tensor: torch.Tensor) -> torch.Tensor:
        memory = contiguous(tensor)
        if memory.data_ptr() != tensor.data_ptr():
            self._copies.append((tensor, memory))
        return memory

    @property
    def copy_back(self) -> Callable[[], None] | None:
        if not self._copies:
            return None

        def copy() -> None:
            with torch.no_grad():
                for tensor, memory in self._copies:
                    tensor.copy_(memory)

        return copy


def parts_of(memory: torch.Tensor, world: int) -> list[torch.Tensor]:
    """A contiguous tensor in `world` equal parts."""
    flat = memory.view(-1)
    return list(flat.chunk(world)) if flat.numel() else [flat] * world


def root_of(opts: Any, world: int, operation: str) -> int:
    root = int(opts.rootRank) if opts is not None else 0
    if not 0 <= root < world:
        raise Unsupported(f"{operation}: the root {root} is not one of the group's {world} ranks")
    return root


def check_alike(tensors: Sequence[torch.Tensor], like: torch.Tensor, operation: str) -> None:
    """All of one size and dtype, dense and on the CPU."""
    for tensor in tensors:
        arguments.check_tensor(tensor, operation)
        if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
            raise Unsupported(
                f"{operation}: all tensors must have one size and dtype; got {tensor.numel()} "
                f"elements of {tensor.dtype} beside {like.numel()} of {like.dtype}"
            )


def one_list(lists: list[list[torch.Tensor]], world: int, operation: str) -> list[torch.Tensor]:
    """The only list of those that c10d made for several GPUs per process: one tensor per rank."""
    if len(lists) != 1 or len(lists[0]) != world:
        raise Unsupported(f"{operation} needs one list of {world} tensors, one per rank")
    return lists[0]


def check_times_world(
    whole: torch.Tensor, part: torch.Tensor, world: int, operation: str, name: str
) -> None:
    if whole.numel() != part.numel() * world:
        raise Unsupported(
            f"{operation}: the {name} has {whole.numel()} elements; {world} ranks with "
            f"{part.numel()} each need {part.numel() * world}"
        )
