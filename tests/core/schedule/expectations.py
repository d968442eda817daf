"""The expected results of collectives, computed in other ways than the tested code does.

Integers are Python's, cut to size. bfloat16 is rounded by a search for the nearest of all its
values. The order of operands is written out for each algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from sealring.core.engine.collective import COMPLEXES, FLOATS, DType, ReduceKind
from sealring.core.schedule import ALGORITHMS, Algorithm, Operation, Program, program_for

Array = np.ndarray[Any, Any]
Combine = Callable[[Array, Array], Array]

# Magnitudes of all bfloat16 values in the order of their bits. Infinity stands at 2**128, which is
# where rounding places it.
_MAGNITUDES = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
_MAGNITUDES = np.append(_MAGNITUDES, 2.0**128)

NUMPY_TYPE: dict[DType, type[np.generic]] = {
    dtype: np.dtype(dtype.name.lower()).type
    for dtype in DType
    if dtype not in (DType.BFLOAT16, DType.BYTES)
} | {DType.BFLOAT16: np.uint16}


def programs(
    operation: Operation, algorithm: Algorithm, world: int, **options: Any
) -> list[Program]:
    return [program_for(operation, algorithm, world, rank, **options) for rank in range(world)]


def all_algorithms() -> list[tuple[Operation, Algorithm]]:
    return [
        (operation, algorithm) for operation in Operation for algorithm in ALGORITHMS[operation]
    ]


def random_array(dtype: DType, length: int, rng: np.random.Generator) -> Array:
    """Returns values that sometimes overflow, cancel or vanish, and special values."""
    if dtype is DType.BOOL:
        return rng.integers(0, 2, length).astype(np.bool_)
    if dtype in COMPLEXES:
        part = DType.FLOAT32 if dtype is DType.COMPLEX64 else DType.FLOAT64
        return random_array(part, 2 * length, rng).view(NUMPY_TYPE[dtype])
    if dtype not in FLOATS:
        return np.frombuffer(rng.bytes(length * dtype.itemsize), NUMPY_TYPE[dtype]).copy()
    with np.errstate(all="ignore"):
        values = rng.standard_normal(length) * 2.0 ** rng.integers(-14, 15, length)
        special = rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan, 65504.0, 6e-8, 3e38], length)
        values = np.where(rng.random(length) < 0.1, special, values)
        if dtype is DType.BFLOAT16:
            return nearest_bfloat16_bits(values.astype(np.float32))
        return values.astype(NUMPY_TYPE[dtype])


def bfloat16_value(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def nearest_bfloat16_bits(values: Array) -> Array:
    magnitude = np.minimum(np.abs(values.astype(np.float64)), 2.0**128)
    below = np.minimum(np.searchsorted(_MAGNITUDES, magnitude, side="right") - 1, 0x7F7F)
    to_lower = magnitude - _MAGNITUDES[below]
    to_upper = _MAGNITUDES[below + 1] - magnitude
    up = (to_upper < to_lower) | ((to_upper == to_lower) & (below % 2 == 1))
    bits = (below + up) | np.where(np.signbit(values), 0x8000, 0)
    return np.where(np.isnan(values), 0x7FC0, bits).astype(np.uint16)


def combiner(dtype: DType, kind: ReduceKind) -> Combine:
    """Returns the function (dst, incoming) -> dst op incoming."""
    summing = kind in (ReduceKind.SUM, ReduceKind.AVG, ReduceKind.PREMUL_SUM)
    if dtype is DType.BFLOAT16 and kind not in (ReduceKind.MIN, ReduceKind.MAX):
        ufunc = np.add if summing else np.multiply
        return lambda a, b: nearest_bfloat16_bits(ufunc(bfloat16_value(a), bfloat16_value(b)))
    if dtype in COMPLEXES:
        return (lambda a, b: a + b) if summing else _complex_product
    if dtype in FLOATS:
        if kind in (ReduceKind.MIN, ReduceKind.MAX):
            sign = 1 if kind is ReduceKind.MIN else -1
            return lambda a, b: _float_extreme(a, b, dtype, sign)
        return (lambda a, b: a + b) if summing else (lambda a, b: a * b)
    return lambda a, b: _integer_combination(a, b, kind)


def _complex_product(left: Array, right: Array) -> Array:
    product = np.empty_like(left)
    product.real = left.real * right.real - left.imag * right.imag
    product.imag = left.real * right.imag + left.imag * right.real
    return product


def _float_extreme(left: Array, right: Array, dtype: DType, sign: int) -> Array:
    def rank(element: Any) -> tuple[bool, float, float]:
        value = float(
            bfloat16_value(np.array([element]))[0] if dtype is DType.BFLOAT16 else element
        )
        return (value == value, sign * value, sign * np.copysign(1.0, value))

    return np.array([min(pair, key=rank) for pair in zip(left, right, strict=True)], left.dtype)


def _integer_combination(left: Array, right: Array, kind: ReduceKind) -> Array:
    boolean = left.dtype == np.bool_
    operation: Callable[[int, int], int] = {  # type: ignore[assignment]
        ReduceKind.SUM: lambda a, b: max(a, b) if boolean else a + b,
        ReduceKind.AVG: lambda a, b: a + b,
        ReduceKind.PRODUCT: lambda a, b: a * b,
        ReduceKind.MIN: min,
        ReduceKind.MAX: max,
        ReduceKind.BAND: lambda a, b: a & b,
        ReduceKind.BOR: lambda a, b: a | b,
        ReduceKind.BXOR: lambda a, b: a ^ b,
    }[kind]
    bits = 8 * left.itemsize
    results = [operation(int(a), int(b)) % 2**bits for a, b in zip(left, right, strict=True)]
    return np.array(results, f"u{left.itemsize}").view(left.dtype)


def averaged(total: Array, world: int, dtype: DType) -> Array:
    if dtype is DType.BFLOAT16:
        return nearest_bfloat16_bits(bfloat16_value(total) / np.float32(world))
    if dtype in COMPLEXES:
        halves = total.view(total.real.dtype)
        return (halves / halves.dtype.type(world)).view(total.dtype)
    if dtype is DType.FLOAT16:
        return (total.astype(np.float32) / np.float32(world)).astype(np.float16)
    if dtype in FLOATS:
        return total / total.dtype.type(world)
    quotients = [(abs(int(x)) // world) * (1 if x > 0 else -1) for x in total]
    return np.array(quotients, total.dtype)


def scaled(values: Array, factor: float, dtype: DType) -> Array:
    if dtype is DType.BFLOAT16:
        return nearest_bfloat16_bits(bfloat16_value(values) * np.float32(factor))
    if dtype is DType.FLOAT16:
        return (values.astype(np.float32) * np.float32(factor)).astype(np.float16)
    if dtype in COMPLEXES:
        halves = values.view(values.real.dtype)
        return (halves * halves.dtype.type(factor)).view(values.dtype)
    return values * values.dtype.type(factor)


def reduced(
    contributions: Sequence[Array],
    owner: int,
    algorithm: Algorithm,
    dtype: DType,
    kind: ReduceKind,
    factor: float = 1.0,
) -> Array:
    """Reduces one chunk over all ranks, in the order of operands that `algorithm` documents."""
    world = len(contributions)
    combine = combiner(dtype, kind)
    with np.errstate(all="ignore"):
        if kind is ReduceKind.PREMUL_SUM:
            contributions = [scaled(each, factor, dtype) for each in contributions]
        if algorithm is Algorithm.DIRECT:
            total = reduce(combine, contributions)
        else:
            along_the_ring = [contributions[(owner + 1 + hop) % world] for hop in range(world)]
            total = reduce(lambda passing, own: combine(own, passing), along_the_ring)
        return averaged(total, world, dtype) if kind is ReduceKind.AVG else total


def assert_same_bits(actual: Array, expected: Array, dtype: DType) -> None:
    """Asserts that the bits are equal; any NaN equals any other NaN."""
    assert actual.dtype == expected.dtype
    if dtype in COMPLEXES:
        part = DType.FLOAT32 if dtype is DType.COMPLEX64 else DType.FLOAT64
        assert_same_bits(actual.view(NUMPY_TYPE[part]), expected.view(NUMPY_TYPE[part]), part)
        return
    unsigned = f"u{dtype.itemsize}"
    same = actual.view(unsigned) == expected.view(unsigned)
    if dtype in FLOATS:
        values = [bfloat16_value(x) if dtype is DType.BFLOAT16 else x for x in (actual, expected)]
        same |= np.isnan(values[0]) & np.isnan(values[1])
    assert same.all(), (actual[~same], expected[~same])
