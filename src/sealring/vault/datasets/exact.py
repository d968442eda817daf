"""Numbers as an array of a given type, with the same bytes on every CPU.

Two conversions differ between CPUs. A float outside an integer type's range becomes the nearest
integer of that type on aarch64 and any other on x86_64, and a NaN keeps other bits. numpy makes
floats of a list of large integers. So integers stay integers here, a float's range is checked
before its cast, and every NaN that is converted becomes the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_WHOLE: Final = (int, np.integer, np.bool_)
_REAL: Final = (float, np.float16, np.float32)


def as_array(value: Any, dtype: np.dtype[Any]) -> Array:
    """Integers are kept; floats may be rounded to another float type. Else ValueError."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return _from_elements(value, dtype)
    given = np.asarray(value)  # it has a type of its own, or it is refused below
    if given.ndim != 1:
        raise ValueError(f"it has {given.ndim} dimensions and not one")
    return _converted(given, dtype)


def _from_elements(values: Sequence[Any], dtype: np.dtype[Any]) -> Array:
    types = set(map(type, values))
    if any(issubclass(one, Sequence | np.ndarray) for one in types - {str, bytes}):
        raise ValueError("it has 2 dimensions or more and not one")
    if not all(issubclass(one, _WHOLE + _REAL) for one in types):
        raise ValueError("an element is no number")
    given = None
    if all(issubclass(one, _REAL) for one in types):
        given = np.array(list(map(float, values)), dtype=np.float64)
    elif all(issubclass(one, _WHOLE) for one in types):
        given = _integers(list(map(int, values)))
    if given is not None:
        return _converted(given, dtype)
    if len(values) == 1:
        raise _unfit(dtype)
    # Integers beside floats, or below 0 beside above 2^63: no type of numpy holds them all exactly.
    return np.concatenate([_from_elements([one], dtype) for one in values])


def _integers(values: list[int]) -> Array | None:
    """None if they fit neither int64 nor uint64."""
    least, most = min(values), max(values)
    for dtype in (np.int64, np.uint64):
        bounds = np.iinfo(dtype)
        if bounds.min <= least and most <= bounds.max:
            return np.array(values, dtype=dtype)
    return None


def _converted(given: Array, dtype: np.dtype[Any]) -> Array:
    if given.dtype == dtype:
        return given
    kinds = given.dtype.kind, dtype.kind
    # A longdouble has 80 bits on x86_64 and 128 on aarch64.
    if given.size and (kinds[0] not in "biuf" or given.dtype.itemsize > 8):
        raise ValueError("an element is no number")
    if not given.size:
        return np.empty(0, dtype=dtype)
    if kinds == ("f", "f"):
        return _rounded(given, dtype)
    if kinds[0] == "f":
        return _truncated(given, dtype)
    if kinds[1] == "f":
        made = _rounded(given, dtype)
        wide = np.dtype(np.uint64 if given.dtype.kind == "u" else np.int64)
        if not np.array_equal(_truncated(made, wide), given.astype(wide)):
            raise _unfit(dtype)
        return made
    bounds = np.iinfo(dtype)
    if int(given.min()) < bounds.min or int(given.max()) > bounds.max:
        raise _unfit(dtype)
    return given.astype(dtype)


def _rounded(given: Array, dtype: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        made = given.astype(dtype)
    if not np.array_equal(np.isinf(made), np.isinf(given)):
        raise _unfit(dtype)
    made[np.isnan(given)] = np.nan
    return made


def _truncated(given: Array, dtype: np.dtype[Any]) -> Array:
    """Floats that are integers of this type already."""
    wide = given.astype(np.float64)
    bounds = np.iinfo(dtype)
    # The ends are powers of two or 0, so exact as floats; the largest integer itself need not be.
    inside = (wide >= float(bounds.min)) & (wide < float(bounds.max + 1))
    if not bool((inside & (np.trunc(wide) == wide)).all()):
        raise _unfit(dtype)
    return wide.astype(dtype)


def _unfit(dtype: np.dtype[Any]) -> ValueError:
    return ValueError(f"an element does not fit {dtype.name}")
