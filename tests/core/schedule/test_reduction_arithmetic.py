"""Single reductions follow the definition, especially where engines tend to differ."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.core.engine.collective import DType, ReduceKind, supported, supported_kinds
from tests.core.reference import (
    bfloat16_bits_to_float32,
    divide_by_world,
    float32_to_bfloat16_bits,
    reduce_into,
)
from tests.core.schedule.expectations import (
    NUMPY_TYPE,
    assert_same_bits,
    bfloat16_value,
    combiner,
    nearest_bfloat16_bits,
    random_array,
)


@pytest.mark.parametrize("dtype", NUMPY_TYPE)
def test_every_reduction_of_many_pairs(dtype) -> None:
    rng = np.random.default_rng(dtype)
    for kind in supported_kinds(dtype):
        dst, incoming = random_array(dtype, 500, rng), random_array(dtype, 500, rng)
        with np.errstate(all="ignore"):
            wanted = combiner(dtype, kind)(dst, incoming)
        reduce_into(dst, incoming, dtype, kind)
        assert_same_bits(dst, wanted, dtype)


def test_every_bfloat16_survives_widening_and_rounding() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    assert_same_bits(float32_to_bfloat16_bits(bfloat16_bits_to_float32(bits)), bits, DType.BFLOAT16)


@given(st.lists(st.floats(width=32), max_size=30))
def test_rounding_to_bfloat16_finds_the_nearest_value(values) -> None:
    single = np.array(values, np.float32)
    rounded = float32_to_bfloat16_bits(single)
    assert_same_bits(rounded, nearest_bfloat16_bits(single), DType.BFLOAT16)


@pytest.mark.parametrize(
    ("bits", "rounded"),
    [
        (0x3F808000, 0x3F80),  # a tie, to even: down
        (0x3F818000, 0x3F82),  # a tie, to even: up
        (0x3F808001, 0x3F81),
        (0x7F7FFFFF, 0x7F80),  # beyond the largest: infinity
        (0x7F800001, 0x7FC0),  # a NaN whose payload would be cut off stays a NaN
        (0x80000001, 0x8000),  # tiny and negative: minus zero
    ],
)
def test_bfloat16_rounding_cases(bits, rounded) -> None:
    value = np.array([bits], np.uint32).view(np.float32)
    assert float32_to_bfloat16_bits(value)[0] == rounded


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64])
def test_min_and_max_know_nan_and_minus_zero(dtype) -> None:
    values = np.array([0.0, -0.0, np.nan, 1.0, np.nan], np.float32)
    others = np.array([-0.0, 0.0, 1.0, np.nan, np.nan], np.float32)
    for kind, zeros_negative in ((ReduceKind.MIN, True), (ReduceKind.MAX, False)):
        if dtype is DType.BFLOAT16:
            dst, incoming = nearest_bfloat16_bits(values), nearest_bfloat16_bits(others)
        else:
            dst, incoming = (x.astype(NUMPY_TYPE[dtype]) for x in (values, others))
        reduce_into(dst, incoming, dtype, kind)
        result = bfloat16_value(dst) if dtype is DType.BFLOAT16 else dst
        assert list(np.signbit(result[:2])) == [zeros_negative] * 2
        assert np.isnan(result[2:]).all()


def test_integer_averages_truncate_toward_zero() -> None:
    values = np.array([-128, -7, -1, 0, 1, 7, 127], np.int8)
    divide_by_world(values, 2, DType.INT8)
    assert list(values) == [-64, -3, 0, 0, 0, 3, 63]


def test_a_world_larger_than_the_type_divides_to_nothing() -> None:
    values = np.array([-128, 127], np.int8)
    divide_by_world(values, 1000, DType.INT8)
    assert list(values) == [0, 0]
    largest = np.array([2**64 - 1], np.uint64)
    divide_by_world(largest, 3, DType.UINT64)
    assert largest[0] == (2**64 - 1) // 3
    smallest = np.array([-(2**63)], np.int64)
    divide_by_world(smallest, 3, DType.INT64)
    assert smallest[0] == -((2**63) // 3)


def test_what_is_supported() -> None:
    assert not supported(DType.COMPLEX64, ReduceKind.MIN)
    assert not supported(DType.FLOAT32, ReduceKind.BXOR)
    assert not supported(DType.BOOL, ReduceKind.AVG)
    assert not supported(DType.INT32, ReduceKind.PREMUL_SUM)
    assert not supported(DType.BYTES, ReduceKind.SUM)
    assert all(supported(dtype, ReduceKind.NONE) for dtype in DType)


def test_item_sizes_are_numpy_s() -> None:
    assert {d: np.dtype(t).itemsize for d, t in NUMPY_TYPE.items()} == {
        d: d.itemsize for d in NUMPY_TYPE
    }
