"""What every collective needs: an algorithm, the queue, and the result where the user wants it."""

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
"""Equal for calls that differ in their tensors' addresses alone."""


class Calling(dist.ProcessGroup):
    """The part of SealedProcessGroup that the collectives stand on."""

    _rank: int
    _world: int
    engine: CollectiveEngine

    def has_torch_hooks(self) -> bool:
        raise NotImplementedError

    def _choose(self, operation: Operation, nbytes: int, device: torch.device) -> Algorithm:
        raise NotImplementedError

    def _gathering(self, own: torch.Tensor, slots: list[Slot]) -> Collective:
        """The all_gather of one tensor per rank, all of one size; the last slot is our own's."""
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
        """`keep` is the memory that is read and written. `called` is the operation where it is made
        of several collectives."""
        raise NotImplementedError

    def _prepare(self, key: Key, collective: Collective, tensor: torch.Tensor) -> None:
        """Called with a call's only collective and tensor, so that the next like it is quick."""
        raise NotImplementedError

    def _run_prepared(
        self, key: Key, tensor: torch.Tensor, result: list[torch.Tensor], opts: Any
    ) -> dist.Work | None:
        """Runs a call like an earlier one; None where it must be made anew."""
        raise NotImplementedError


class Results:
    """Memory that a collective writes: the user's own where that is possible, else a copy of it.

    It is not possible where the elements are not one run of memory, and where two tensors of one
    call share memory. All that a call reads is read before its results are written there.
    """

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._last: Callable[[], None] | None = None

    def then(self, last: Callable[[], None]) -> None:
        """What is to be done with the results when they are there."""
        self._last = last

    def of_one(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Slot]:
        """Memory that begins with the tensor's elements and ends with the result."""
        if not arguments.is_one_run(tensor):
            memory.check_can_hold(tensor, self._operation)
            memory.extent(tensor)
            tensor = self._copy(tensor, arguments.contiguous(tensor))
        return tensor, memory.slot(tensor, written=True)

    def of(
        self, tensors: Sequence[torch.Tensor], read: Sequence[Slot]
    ) -> tuple[list[torch.Tensor], list[Slot]]:
        """Memory for results, of which nothing is read; `read` is what else the call reads."""
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
        """A copy that takes the tensor's place in the call, elements and result."""
        memory.check_can_hold(tensor, self._operation)
        memory.extent(tensor)
        plain = tensor.detach().resolve_conj().resolve_neg()
        # Contiguous: a copy with other strides would be copied once more, and not back.
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
        """Called when the call is done, on any thread; what it raises the waiter gets."""
        for tensor, private in self._copies:
            memory.extent(tensor)  # the script may have resized its storage meanwhile
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.detach().copy_(private)
        if self._last is not None:
            with torch.no_grad():
                self._last()
