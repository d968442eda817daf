"""What a reduction computes, to the bit: the definition that every engine follows.

A step combines as ``new = dst op incoming`` with ``dst`` on the left. One step rounds once:

- float32, float64: the IEEE 754 operation, to nearest even, subnormals kept, nothing fused.
- float16, bfloat16: both widened to float32, one float32 operation, rounded to nearest even back.
- MIN, MAX: the incoming element is taken if it is smaller (larger) or a NaN, else ``dst`` stays. So
  a NaN once seen stays. -0.0 is smaller than 0.0, whichever came first.
- Integers wrap around.
- bool: SUM, MAX, BOR are `or`; PRODUCT, MIN, BAND are `and`; BXOR is `xor`.
- Complex: parts are added each; (a+bi)(c+di) is (ac - bd) + (ad + bc)i, every product, difference
  and sum rounded by itself.
- AVG sums like SUM and divides once at the end, by the world. Floats: a true division (16-bit types
  in float32, then rounded). Complex: each part. Integers: the wrapped sum, truncated toward zero.
- PREMUL_SUM multiplies each contribution once, before it is summed: the factor is rounded to
  float32 (float64 for float64 and complex128), the product to the element type.

That a result is a NaN is defined; which of the many NaNs it is, is not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sealring.engine.datatypes import COMPLEXES, FLOATS, SIGNED, DType, ReduceKind, supported_kinds
from sealring.errors import Unsupported

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
    """Exact: bfloat16 is float32's upper half."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float32_to_bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounded to nearest, ties to even; a NaN stays one, made quiet."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    upper = bits >> np.uint32(16)
    rounded = (bits + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), upper | np.uint32(0x40), rounded).astype(np.uint16)


def reduce_into(dst: Array, incoming: Array, dtype: DType, kind: ReduceKind) -> None:
    """dst = dst op incoming, element by element. bfloat16 comes as its bits, in uint16."""
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
            # NumPy's bool addition and multiplication are `or` and `and`, as we define them.
            _plain_ufunc(kind)(dst, incoming, out=dst)


def divide_by_world(dst: Array, world: int, dtype: DType) -> None:
    """The end of an AVG."""
    if dtype in COMPLEXES:
        divide_by_world(dst.view(_real_type(dtype)), world, _REAL_PART[dtype])
    elif dtype in _SIXTEEN_BIT_FLOATS:
        _narrow_into(dst, _widened(dst, dtype) / np.float32(world), dtype)
    elif dtype in (DType.FLOAT32, DType.FLOAT64):
        np.divide(dst, dst.dtype.type(world), out=dst)
    elif dtype in SIGNED:
        # In 64 bits, because a large world need not fit the type; its quotients always do.
        wide = dst.astype(np.int64)
        floor = wide // world
        dst[:] = floor + ((wide < 0) & (floor * world != wide))
    else:
        dst[:] = dst.astype(np.uint64) // np.uint64(world)


def multiply_by(dst: Array, factor: float, dtype: DType) -> None:
    """The beginning of a PREMUL_SUM."""
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
        # Comparison takes the two zeros for equal, and finds nothing smaller or larger than a NaN.
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
