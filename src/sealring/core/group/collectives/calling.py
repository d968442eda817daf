"""The base of all collectives: choosing an algorithm, queueing, and results in the user's
memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from sealring.core.engine.collective import Collective
from sealring.core.engine.engine import CollectiveEngine
from sealring.core.group import arguments, memory
from sealring.core.group.memory import Slot
from sealring.core.group.work import Result
from sealring.core.schedule import Algorithm, Operation

Key = tuple[object, ...]
"""Identifies calls that differ only in their tensors' addresses."""


class Calling(dist.ProcessGroup):
    """The methods of SealedProcessGroup that the collectives' classes call."""

    _rank: int
    _world: int
    engine: CollectiveEngine

    def has_torch_hooks(self) -> bool:
        raise NotImplementedError

    def _choose(self, operation: Operation, nbytes: int, device: torch.device) -> Algorithm:
        raise NotImplementedError

    def _gathering(self, own: torch.Tensor, slots: list[Slot]) -> Collective:
        """An all_gather of one tensor per rank, all of one size. The last slot is this rank's
        input."""
        _, size = slots[-1]
        return Collective(
            Operation.ALL_GATHER,
            self._choose(Operation.ALL_GATHER, size, own.device),
            slots,
            size * self._world,
            arguments.moved_dtype(own),
        )

    def _submit(
        self,
        name: str,
        collectives: Collective | Iterable[Collective],
        opts: Any,
        *,
        result: Result,
        keep: tuple[torch.Tensor, ...],
        on_success: Callable[[], None] | None = None,
        called: Operation | None = None,
    ) -> dist.Work:
        """Queues a call, or runs it at once; returns its work.

        `keep` has the tensors whose memory is read and written. `called` is the operation that the
        script called, if the call consists of several collectives.
        """
        raise NotImplementedError

    def _prepare(self, key: Key, collective: Collective, tensor: torch.Tensor) -> None:
        """Prepares a call with one collective and one tensor, so that the next such call is
        fast."""
        raise NotImplementedError

    def _run_prepared(
        self, key: Key, tensor: torch.Tensor, result: list[torch.Tensor], opts: Any
    ) -> dist.Work | None:
        """Runs a call that was prepared under `key`; None if the call must be made anew."""
        raise NotImplementedError


class Results:
    """The memory that a collective writes: the user's tensors if possible, else copies of them.

    Copies are needed if a tensor's elements are not one after the other in memory, and if two
    tensors of one call share memory. Copies are written back after the call has read all its
    inputs.
    """

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._last: Callable[[], None] | None = None

    def then(self, last: Callable[[], None]) -> None:
        """Sets a function to be called when the results are there."""
        self._last = last

    def of_one(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Slot]:
        """Returns memory that holds the tensor's elements first and then the result."""
        if not arguments.is_one_run(tensor):
            memory.check_can_hold(tensor, self._operation)
            memory.extent(tensor)
            tensor = self._copy(tensor, arguments.contiguous(tensor))
        return tensor, memory.slot(tensor, written=True)

    def of(
        self, tensors: Sequence[torch.Tensor], read: Sequence[Slot]
    ) -> tuple[list[torch.Tensor], list[Slot]]:
        """Returns memory for results; the call does not read it before it writes it.

        `read` has the memory that the call reads. Results that overlap it are written to copies.
        """
        held = [
            tensor if arguments.is_one_run(tensor) else self._private(tensor) for tensor in tensors
        ]
        slots = [memory.slot(tensor, written=True) for tensor in held]
        if memory.clash(slots, read):
            self._copies.clear()
            held = [self._private(tensor) for tensor in tensors]
            slots = [memory.slot(tensor, written=True) for tensor in held]
        return held, slots

    def snapshot(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy that the call uses instead of the tensor, both as input and as result."""
        memory.check_can_hold(tensor, self._operation)
        memory.extent(tensor)
        plain = tensor.detach().resolve_conj().resolve_neg()
        # Contiguous, because `of_one` would copy any other clone again, and not copy that back.
        return self._copy(tensor, plain.clone(memory_format=torch.contiguous_format))

    def _private(self, tensor: torch.Tensor) -> torch.Tensor:
        memory.check_can_hold(tensor, self._operation)
        memory.extent(tensor)
        private = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return self._copy(tensor, private)

    def _copy(self, tensor: torch.Tensor, private: torch.Tensor) -> torch.Tensor:
        self._copies.append((tensor, private))
        return private

    @property
    def copy_back(self) -> Callable[[], None] | None:
        return self._copy_to_user if self._copies or self._last is not None else None

    def _copy_to_user(self) -> None:
        """Called on any thread when the call is done. The waiter gets the exceptions it raises."""
        for tensor, private in self._copies:
            memory.extent(tensor)  # the script may have resized its storage meanwhile
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.detach().copy_(private)
        if self._last is not None:
            with torch.no_grad():
                self._last()
