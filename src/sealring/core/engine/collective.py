"""The description of a collective that the engine runs, and the reductions of each element type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sealring import _native
from sealring._native import DType as DType
from sealring._native import ReduceKind as ReduceKind
from sealring.core.schedule import Algorithm, Levels, Operation, Program

FLOATS: Final = frozenset({DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64})
COMPLEXES: Final = frozenset({DType.COMPLEX64, DType.COMPLEX128})
SIGNED: Final = frozenset({DType.INT8, DType.INT16, DType.INT32, DType.INT64})
UNSIGNED: Final = frozenset({DType.UINT8, DType.UINT16, DType.UINT32, DType.UINT64})

_ARITHMETIC: Final = frozenset({ReduceKind.SUM, ReduceKind.PRODUCT})
_ORDER: Final = frozenset({ReduceKind.MIN, ReduceKind.MAX})
_BITWISE: Final = frozenset({ReduceKind.BAND, ReduceKind.BOR, ReduceKind.BXOR})


def supported_kinds(dtype: DType) -> frozenset[ReduceKind]:
    """The reductions that are defined for elements of this type."""
    if dtype in FLOATS:
        return _ARITHMETIC | _ORDER | {ReduceKind.AVG, ReduceKind.PREMUL_SUM}
    if dtype in COMPLEXES:
        return _ARITHMETIC | {ReduceKind.AVG, ReduceKind.PREMUL_SUM}
    if dtype in SIGNED or dtype in UNSIGNED:
        return _ARITHMETIC | _ORDER | _BITWISE | {ReduceKind.AVG}
    if dtype is DType.BOOL:
        return _ARITHMETIC | _ORDER | _BITWISE
    return frozenset()


def supported(dtype: DType, kind: ReduceKind) -> bool:
    """Whether `kind` is defined for `dtype`. NONE (no reduction) is defined for every type."""
    return kind is ReduceKind.NONE or kind in supported_kinds(dtype)


@dataclass(frozen=True, slots=True)
class Collective:
    """One call: the program to run and the memory to run it on."""

    operation: Operation
    algorithm: Algorithm
    slots: Sequence[tuple[int, int]]
    """(address, bytes) of each slot, in the order the program numbers them."""
    total: int | None
    """Bytes of the user's tensor, which must be equal on all ranks. None for all_to_all, where only
    the two ends of a message know its length; each record then states the length."""
    dtype: DType
    reduction: ReduceKind = ReduceKind.NONE
    factor: float = 1.0
    root: int = 0
    ready: int | None = None
    """Handle of the CUDA event after which the slots may be used; None if they are host memory."""


def to_native(program: Program, levels: Levels | None = None) -> _native.Program:
    """Converts a program for the native core.

    `levels` is given where GPUs exchange records by NCCL. It says in which exchange each step's
    records go.
    """
    of_steps = levels.of_steps if levels else [0] * len(program.steps)
    return _native.Program(
        program.operation,
        program.algorithm,
        program.rank,
        program.world,
        program.slots,
        program.scratch,
        [
            (
                step.action,
                step.slot,
                step.peers,
                step.message,
                step.origin,
                step.source,
                step.after,
                level,
            )
            for step, level in zip(program.steps, of_steps, strict=True)
        ],
        levels.count if levels else 1,
    )
