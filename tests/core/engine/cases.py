"""Collectives on NumPy arrays, set up as the process group does it, and their right results."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from sealring.core.engine.collective import COMPLEXES, Collective, DType, ReduceKind
from sealring.core.schedule import (
    ALGORITHMS,
    Algorithm,
    Operation,
    Topology,
    chunks,
    cuts_into_chunks,
    program_for,
    segment_bytes,
)
from tests.core.engine.local_world import slot
from tests.core.reference import run_reference

Array = npt.NDArray[Any]

PROGRAMS = [
    (operation, algorithm) for operation in Operation for algorithm in ALGORITHMS[operation]
]
each_program = pytest.mark.parametrize(
    ("operation", "algorithm"), PROGRAMS, ids=[f"{o.name}-{a.name}".lower() for o, a in PROGRAMS]
)
_REALS: Final = {DType.COMPLEX64: DType.FLOAT32, DType.COMPLEX128: DType.FLOAT64}


@dataclass(frozen=True)
class Case:
    """One collective, the same on every rank. `elements` is one rank's part of the tensor."""

    operation: Operation
    algorithm: Algorithm
    elements: int = 12
    dtype: DType = DType.FLOAT32
    kind: ReduceKind = ReduceKind.NONE
    root: int = 0
    factor: float = 0.75
    as_reals: bool = False
    """Complex numbers are passed and cut as twice as many reals, as torch does for all_reduce."""

    @property
    def reduced_dtype(self) -> DType:
        return _REALS[self.dtype] if self.as_reals else self.dtype

    def __str__(self) -> str:
        reducing = f"-{self.kind.name}" if self.kind else ""
        words = (self.operation.name, self.algorithm.name, f"{self.elements}x{self.dtype.name}")
        return "-".join(words).lower() + reducing.lower()


class Tensors:
    """One rank's arrays for a case: the slots of its program, and the memory behind them."""

    def __init__(self, case: Case, world: int, rank: int, seed: int = 0) -> None:
        self.case = case
        n = case.elements
        total: int | None
        match case.operation:
            case Operation.ALL_REDUCE if cuts_into_chunks(case.operation, case.algorithm):
                item = case.reduced_dtype.itemsize
                tensor = values(case, n, rank, seed)
                cuts = chunks(len(tensor), world, item)
                self.slots = [tensor[at // item : (at + size) // item] for at, size in cuts]
                total = n
            case (
                Operation.ALL_REDUCE
                | Operation.BROADCAST
                | Operation.REDUCE
                | Operation.INTRODUCTION
                | Operation.OBJECTION
            ):
                self.slots = [values(case, n, rank, seed)]
                total = n
            case Operation.REDUCE_SCATTER:
                parts = [values(case, n, rank, seed + part) for part in range(world)]
                self.slots = [*parts, values(case, n, rank, seed + 1000)]
                total = n * world
            case Operation.ALL_GATHER:
                regions = [values(case, n, rank, seed + 1000 + part) for part in range(world)]
                self.slots = [*regions, values(case, n, rank, seed)]
                total = n * world
            case Operation.GATHER | Operation.SCATTER:
                parts = [values(case, n, rank, seed + part) for part in range(world)]
                one = values(case, n, rank, seed + 1000)
                self.slots = [*parts, one] if rank == case.root else [one]
                total = n * world
            case Operation.ALL_TO_ALL:
                self.slots = [
                    *(values(case, split(n, rank, to), rank, seed + to) for to in range(world)),
                    *(values(case, split(n, of, rank), rank, seed + 99) for of in range(world)),
                ]
                total = None
            case Operation.BARRIER:
                self.slots = [values(case, 0, rank, seed)]
                total = 0
        self.total = None if total is None else total * case.dtype.itemsize

    def collective(self) -> Collective:
        case = self.case
        return Collective(
            case.operation,
            case.algorithm,
            [slot(array) for array in self.slots],
            self.total,
            case.reduced_dtype,
            case.kind,
            case.factor,
            case.root,
        )

    def bits(self) -> list[bytes]:
        return [array.tobytes() for array in self.slots]


def tensors_of(case: Case, world: int, seed: int = 0) -> list[Tensors]:
    return [Tensors(case, world, rank, seed) for rank in range(world)]


def split(elements: int, sender: int, receiver: int) -> int:
    """How much of an all_to_all goes from one rank to another: unequal, sometimes nothing."""
    return elements * ((3 * sender + 5 * receiver) % 4) // 2


def expected(
    case: Case, world: int, seed: int, record_bytes: int, topology: Topology | None = None
) -> list[list[bytes]]:
    """The bits of every rank's slots after the collective, by the reference engine."""
    per_rank = tensors_of(case, world, seed)
    longest = (
        None
        if case.operation is Operation.ALL_TO_ALL
        else max(array.nbytes for tensors in per_rank for array in tensors.slots)
    )
    run_reference(
        [
            program_for(
                case.operation,
                case.algorithm,
                world,
                rank,
                root=case.root,
                average=case.kind is ReduceKind.AVG,
                premultiply=case.kind is ReduceKind.PREMUL_SUM,
                topology=topology,
            )
            for rank in range(world)
        ],
        [tensors.slots for tensors in per_rank],
        case.kind,
        dtype=case.reduced_dtype,
        segment_bytes=segment_bytes(longest, record_bytes),
        factor=case.factor,
    )
    return [tensors.bits() for tensors in per_rank]


def values(case: Case, elements: int, rank: int, seed: int) -> Array:
    """Numbers that look like gradients, the same for the same arguments. No result is a NaN: the
    bits of a NaN may differ from machine to machine."""
    random = np.random.default_rng([zlib.crc32(case.dtype.name.encode()), rank, seed])
    match case.dtype:
        case DType.BOOL:
            return random.integers(0, 2, elements).astype(np.bool_)
        case DType.BYTES:
            return random.integers(0, 256, elements, dtype=np.uint8)
        case DType.BFLOAT16:
            floats = random.standard_normal(elements).astype(np.float32)
            return (floats.view(np.uint32) >> 16).astype(np.uint16)
        case _ if case.dtype in COMPLEXES:
            both = random.standard_normal(2 * elements)
            numbers = both.view(np.complex128).astype(case.dtype.name.lower())
            return numbers.view(case.reduced_dtype.name.lower())
    kind = np.dtype(case.dtype.name.lower())
    if kind.kind == "f":
        floats = random.standard_normal(elements).astype(kind)
        floats[random.random(elements) < 0.1] = 0.0
        floats[random.random(elements) < 0.1] = -0.0
        return floats
    limits = np.iinfo(kind)
    return random.integers(limits.min, limits.max, elements, dtype=kind, endpoint=True)
