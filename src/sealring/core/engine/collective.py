"""A collective as the engine is called with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sealring.core.engine.datatypes import DType, ReduceKind
from sealring.core.schedule import Algorithm, Operation


@dataclass(frozen=True, slots=True)
class Collective:
    """One call: which program, on which memory."""

    operation: Operation
    algorithm: Algorithm
    slots: Sequence[tuple[int, int]]
    """(address, bytes) of each slot, in the order the program numbers them."""
    total: int | None
    """Bytes of the tensor as the user sees it; all ranks must say the same. None where only the two
    ends of a message know its length (all_to_all): each record then states that."""
    dtype: DType
    reduction: ReduceKind = ReduceKind.NONE
    factor: float = 1.0
    root: int = 0
    ready: int | None = None
    """The slots are in a GPU's memory, and may be used after this CUDA event."""
