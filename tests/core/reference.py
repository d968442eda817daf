"""Defines to the bit what a reduction computes; every engine follows this definition.

A step combines as ``new = dst op incoming`` with ``dst`` on the left. One step rounds once:

- float32, float64: the IEEE 754 operation, to nearest even, subnormals kept, nothing fused.
- float16, bfloat16: both widened to float32, one float32 operation, rounded to nearest even back.
- MIN, MAX: the incoming element is taken if it is smaller (larger) or a NaN, otherwise
  ``dst`` stays. So a NaN stays once it was seen. -0.0 is smaller than 0.0, in either order.
- Integers wrap around.
- bool: SUM, MAX, BOR are `or`; PRODUCT, MIN, BAND are `and`; BXOR is `xor`.
- Complex: the parts are added separately; (a+bi)(c+di) is (ac - bd) + (ad + bc)i, where every
  product, difference and sum is rounded separately.
- AVG sums like SUM and divides once at the end, by the world size. Floats: a true division (16-bit
  types in float32, then rounded). Complex: each part. Integers: the wrapped sum, truncated toward
  zero.
- PREMUL_SUM multiplies each contribution once, before it is summed: the factor is rounded to
  float32 (float64 for float64 and complex128), the product to the element type.

It is defined when a result is a NaN, but not which of the many NaNs it is.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sealring.core.engine.collective import (
    COMPLEXES,
    FLOATS,
    SIGNED,
    DType,
    ReduceKind,
    supported_kinds,
)
from sealring.core.schedule.execution import Execution
from sealring.core.schedule.program import Action, Program, Step
from sealring.errors import Unsupported
from sealring.limits import RECORD_BYTES

Array = npt.NDArray[Any]

_SUMMING = frozenset({ReduceKind.SUM, ReduceKind.AVG, ReduceKind.PREMUL_SUM})
_SIXTEEN_BIT_FLOATS = frozenset({DType.FLOAT16, DType.BFLOAT16})
_REAL_PART = {DType.COMPLEX64: DType.FLOAT32, DType.COMPLEX128: DType.FLOAT64}


def require_supported(dtype: DType, kind: ReduceKind) -> None:
    if kind is ReduceKind.NONE or kind in (kinds := supported_kinds(dtype)):
        return
    allowed = ", ".join(each.name for each in sorted(kinds)) or "none"
    raise Unsupported(f"{kind.name} is not defined for {dtype.name}; defined are: {allowed}")


def bfloat16_bits_to_float32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Widens exactly, because bfloat16 is float32's upper half."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float32_to_bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounds to nearest, ties to even; a NaN stays a NaN and becomes quiet."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    upper = bits >> np.uint32(16)
    rounded = (bits + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), upper | np.uint32(0x40), rounded).astype(np.uint16)


def reduce_into(dst: Array, incoming: Array, dtype: DType, kind: ReduceKind) -> None:
    """Computes dst = dst op incoming for each element; bfloat16 is given as its bits in uint16."""
    with np.errstate(all="ignore"):
        if kind in (ReduceKind.MIN, ReduceKind.MAX):
            _keep_smaller_or_larger(dst, incoming, dtype, kind)
        elif dtype in _SIXTEEN_BIT_FLOATS:
            combine = np.add if kind in _SUMMING else np.multiply
            _narrow_into(dst, combine(_widened(dst, dtype), _widened(incoming, dtype)), dtype)
        elif dtype in COMPLEXES and kind is ReduceKind.PRODUCT:
            a, b, c, d = dst.real, dst.imag, incoming.real, incoming.imag
            dst.real, dst.imag = a * c - b * d, a * d + b * c
        else:
            # NumPy's bool addition and multiplication are `or` and `and`, as defined above.
            _plain_ufunc(kind)(dst, incoming, out=dst)


def divide_by_world(dst: Array, world: int, dtype: DType) -> None:
    """Divides a sum by the world size, which ends an AVG."""
    if dtype in COMPLEXES:
        divide_by_world(dst.view(_real_type(dtype)), world, _REAL_PART[dtype])
    elif dtype in _SIXTEEN_BIT_FLOATS:
        _narrow_into(dst, _widened(dst, dtype) / np.float32(world), dtype)
    elif dtype in (DType.FLOAT32, DType.FLOAT64):
        np.divide(dst, dst.dtype.type(world), out=dst)
    elif dtype in SIGNED:
        # 64 bits, because a large world may not fit the type; the quotients always fit.
        wide = dst.astype(np.int64)
        floor = wide // world
        dst[:] = floor + ((wide < 0) & (floor * world != wide))
    else:
        dst[:] = dst.astype(np.uint64) // np.uint64(world)


def multiply_by(dst: Array, factor: float, dtype: DType) -> None:
    """Multiplies a contribution by the factor, which begins a PREMUL_SUM."""
    with np.errstate(all="ignore"):
        if dtype in COMPLEXES:
            multiply_by(dst.view(_real_type(dtype)), factor, _REAL_PART[dtype])
        elif dtype in _SIXTEEN_BIT_FLOATS:
            _narrow_into(dst, _widened(dst, dtype) * np.float32(factor), dtype)
        else:
            np.multiply(dst, dst.dtype.type(factor), out=dst)


def _plain_ufunc(kind: ReduceKind) -> np.ufunc:
    match kind:
        case ReduceKind.SUM | ReduceKind.AVG | ReduceKind.PREMUL_SUM:
            return np.add
        case ReduceKind.PRODUCT:
            return np.multiply
        case ReduceKind.BAND:
            return np.bitwise_and
        case ReduceKind.BOR:
            return np.bitwise_or
        case ReduceKind.BXOR:
            return np.bitwise_xor
    raise Unsupported(f"{kind.name} combines nothing")


def _keep_smaller_or_larger(dst: Array, incoming: Array, dtype: DType, kind: ReduceKind) -> None:
    old, new = dst, incoming
    if dtype is DType.BFLOAT16:
        old, new = _widened(dst, dtype), _widened(incoming, dtype)
    taken = new < old if kind is ReduceKind.MIN else new > old
    if dtype in FLOATS:
        # A comparison finds the two zeros equal, and nothing smaller or larger than a NaN.
        lesser = np.signbit(new)
        taken |= (new == old) & (lesser if kind is ReduceKind.MIN else ~lesser)
        taken |= np.isnan(new)
    np.copyto(dst, incoming, where=taken)


def _widened(values: Array, dtype: DType) -> npt.NDArray[np.float32]:
    if dtype is DType.BFLOAT16:
        return bfloat16_bits_to_float32(values)
    return values.astype(np.float32)


def _narrow_into(dst: Array, values: npt.NDArray[np.float32], dtype: DType) -> None:
    with np.errstate(all="ignore"):
        dst[:] = (
            float32_to_bfloat16_bits(values)
            if dtype is DType.BFLOAT16
            else values.astype(np.float16)
        )


def _real_type(dtype: DType) -> type[np.floating[Any]]:
    return np.float32 if dtype is DType.COMPLEX64 else np.float64


# ---- The reference engine: all ranks in one process, on NumPy, with nothing sealed
#
# It runs the same programs as the native engine, segment by segment, and defines the right
# results. The functions above define a single reduction.


_UNWRITTEN = 0xA5
"""The bytes that scratch starts with, so that a program that reads it too early always fails."""


def run_reference(
    programs: Sequence[Program],
    slots_per_rank: Sequence[Sequence[Array]],
    op: ReduceKind,
    *,
    dtype: DType | None = None,
    segment_bytes: int = RECORD_BYTES,
    factor: float | None = None,
    window: int = 4,
    link_records: int | None = None,
    shuffle: random.Random | None = None,
) -> None:
    """Runs one collective and leaves its results in the arrays, as the native engine would.

    `slots_per_rank[r]` are the arrays that rank r's caller provides. `dtype` is needed only for a
    type that NumPy lacks: BFLOAT16, whose bits are given in uint16 arrays. `factor` is
    PREMUL_SUM's. `window`, `link_records` and `shuffle` change the order of steps (see Execution)
    and must never change the results.
    """
    dtype = dtype or _dtype_of(slots_per_rank)
    require_supported(dtype, op)
    if op is ReduceKind.PREMUL_SUM and factor is None:
        raise Unsupported("PREMUL_SUM needs a factor")
    if segment_bytes <= 0 or segment_bytes % dtype.itemsize:
        raise Unsupported(f"segments of {segment_bytes} bytes would cut {dtype.name} elements")
    ranks = [
        _Rank(program, slots, op, dtype, segment_bytes // dtype.itemsize, factor)
        for program, slots in zip(programs, slots_per_rank, strict=True)
    ]
    execution = Execution(
        programs,
        segments=[rank.segments() for rank in ranks],
        window=window,
        link_records=link_records,
        shuffle=shuffle,
    )
    records = _Records()
    for turn in execution.turns():
        ranks[turn.rank].run(turn.step, turn.segment, records)


class _Records:
    """All sealed records. A forwarded record keeps its name, so each record has one entry."""

    def __init__(self) -> None:
        self._payloads: dict[tuple[int, int, int, int], Array] = {}

    def seal(self, sealer: int, receiver: int, message: int, segment: int, payload: Array) -> None:
        """Stores a record; `receiver` is -1 for a published record, which is for all ranks."""
        self._payloads[sealer, receiver, message, segment] = payload.copy()

    def open(self, sealer: int, receiver: int, message: int, segment: int) -> Array:
        return self._payloads[sealer, receiver, message, segment]


class _Rank:
    def __init__(
        self,
        program: Program,
        provided: Sequence[Array],
        op: ReduceKind,
        dtype: DType,
        segment_elements: int,
        factor: float | None,
    ) -> None:
        if len(provided) != program.slots:
            raise Unsupported(
                f"rank {program.rank}'s program has {program.slots} slots, {len(provided)} given"
            )
        for number, slot in enumerate(provided):
            if slot.ndim != 1 or not slot.flags.c_contiguous or slot.itemsize != dtype.itemsize:
                raise Unsupported(
                    f"slot {number} of rank {program.rank} is not a contiguous, one-dimensional "
                    f"array of {dtype.name}"
                )
        self._program = program
        self._slots = [*provided, *(_unwritten_like(provided[i]) for i in program.scratch)]
        self._op = op
        self._dtype = dtype
        self._segment_elements = segment_elements
        self._factor = factor

    def segments(self) -> list[int]:
        """Returns how many segments each step has: as many as its slot fills, and at least one."""
        return [
            max(1, -(-self._slots[step.slot].size // self._segment_elements))
            for step in self._program.steps
        ]

    def run(self, index: int, segment: int, records: _Records) -> None:
        step = self._program.steps[index]
        here = self._program.rank
        piece = self._piece(step.slot, segment)
        match step.action:
            case Action.SEND:
                records.seal(here, step.peers[0], step.message, segment, piece)
            case Action.PUBLISH:
                records.seal(here, -1, step.message, segment, piece)
            case Action.FORWARD:
                pass  # the record passes on unchanged; the execution moves it
            case Action.RECEIVE:
                piece[:] = self._opened(step, segment, records)
            case Action.RECEIVE_REDUCE:
                reduce_into(piece, self._opened(step, segment, records), self._dtype, self._op)
            case Action.COPY:
                piece[:] = self._piece(step.source, segment)
            case Action.REDUCE:
                reduce_into(piece, self._piece(step.source, segment), self._dtype, self._op)
            case Action.AVERAGE:
                divide_by_world(piece, self._program.world, self._dtype)
            case Action.PREMULTIPLY:
                if self._factor is None:
                    raise Unsupported("the program multiplies by a factor, and none was given")
                multiply_by(piece, self._factor, self._dtype)

    def _piece(self, slot: int, segment: int) -> Array:
        start = segment * self._segment_elements
        return self._slots[slot][start : start + self._segment_elements]

    def _opened(self, step: Step, segment: int, records: _Records) -> Array:
        if step.origin >= 0:
            return records.open(step.origin, -1, step.message, segment)
        return records.open(step.peers[0], self._program.rank, step.message, segment)


def _unwritten_like(slot: Array) -> Array:
    scratch = np.empty_like(slot)
    scratch.view(np.uint8).fill(_UNWRITTEN)
    return scratch


def _dtype_of(slots_per_rank: Sequence[Sequence[Array]]) -> DType:
    names = {slot.dtype.name for slots in slots_per_rank for slot in slots}
    if len(names) != 1:
        raise Unsupported(f"all arrays must have one dtype, these have {sorted(names)}")
    name = names.pop().upper()
    if name not in DType.__members__:
        raise Unsupported(f"NumPy's {name.lower()} is not an element type of sealring")
    return DType[name]
