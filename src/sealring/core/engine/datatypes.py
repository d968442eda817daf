"""Element types and reductions: the native core's codes, and which pairs are defined."""

from __future__ import annotations

from typing import Final

from sealring._native import DType as DType
from sealring._native import ReduceKind as ReduceKind

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
    """Whether `kind` is defined for `dtype`; NONE, which reduces nothing, is for all."""
    return kind is ReduceKind.NONE or kind in supported_kinds(dtype)
