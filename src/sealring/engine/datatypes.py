"""The numbers by which element types and reductions are known to the native engine."""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class DType(IntEnum):
    """What a tensor's elements are; bound into every record. Shared with native/reduce.hpp."""

    FLOAT16 = 1
    BFLOAT16 = 2
    FLOAT32 = 3
    FLOAT64 = 4
    INT8 = 5
    INT16 = 6
    INT32 = 7
    INT64 = 8
    UINT8 = 9
    UINT16 = 10
    UINT32 = 11
    UINT64 = 12
    BOOL = 13
    COMPLEX64 = 14
    COMPLEX128 = 15
    BYTES = 16
    """Opaque: can be copied and sent, not reduced."""

    @property
    def itemsize(self) -> int:
        return _ITEMSIZE[self]


class ReduceKind(IntEnum):
    """How contributions are combined. Shared with native/reduce.hpp."""

    NONE = 0
    SUM = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    AVG = 8
    PREMUL_SUM = 9


FLOATS: Final = frozenset({DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64})
COMPLEXES: Final = frozenset({DType.COMPLEX64, DType.COMPLEX128})
SIGNED: Final = frozenset({DType.INT8, DType.INT16, DType.INT32, DType.INT64})
UNSIGNED: Final = frozenset({DType.UINT8, DType.UINT16, DType.UINT32, DType.UINT64})

_ITEMSIZE: Final = {
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.FLOAT32: 4,
    DType.FLOAT64: 8,
    DType.INT8: 1,
    DType.INT16: 2,
    DType.INT32: 4,
    DType.INT64: 8,
    DType.UINT8: 1,
    DType.UINT16: 2,
    DType.UINT32: 4,
    DType.UINT64: 8,
    DType.BOOL: 1,
    DType.COMPLEX64: 8,
    DType.COMPLEX128: 16,
    DType.BYTES: 1,
}

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
    """Whether `kind` is defined for `dtype`; NONE, which reduces nothing, is for all."""
    return kind is ReduceKind.NONE or kind in supported_kinds(dtype)
