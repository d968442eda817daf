"""What every collective needs: an algorithm, the queue, and the result where the user wants it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from sealring.engine.cpu import Collective
from sealring.group import arguments
from sealring.group.arguments import contiguous, slot
from sealring.schedule import Algorithm, Operation


class Calling(dist.ProcessGroup):
    """The part of SealedProcessGroup that the collectives stand on."""

    _rank: int
    _world: int

    def _choose(self, operation: Operation, nbytes: int, device: torch.device) -> Algorithm:
        raise NotImplementedError

    def _gathering(self, regions: list[torch.Tensor], own: torch.Tensor) -> Collective:
        """The all_gather of one tensor per rank, all of one size, into contiguous memory."""
        _, size = slot(own)
        return Collective(
            Operation.ALL_GATHER,
            self._choose(Operation.ALL_GATHER, size, own.device),
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
        """`keep` is the memory that is read and written."""
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
