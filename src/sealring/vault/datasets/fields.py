"""The fields of a sample, and a sample's bytes in a shard.

A sample with one field consists of that field's value. A sample with several fields begins with the
size of each value (uint32, little-endian); the values follow. The size 0xFFFFFFFF stands for a
missing value.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import numpy as np
import numpy.typing as npt

from sealring.errors import BadSource, ConfigurationError

Array = npt.NDArray[Any]

_WHOLE: Final = (int, np.integer, np.bool_)
_REAL: Final = (float, np.float16, np.float32)
_MISSING: Final = 0xFFFFFFFF
_INTEGER: Final = struct.Struct("<q")
_FLOAT: Final = struct.Struct("<d")
_SIZE: Final = struct.Struct("<I")
_ARRAY: Final = "array:"
_TYPES: Final = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
                 "float16", "float32", "float64")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    kind: str
    """bytes, text, json, int64, float64, bool, files, or `array:` followed by an element type."""

    def __post_init__(self) -> None:
        dtype = self.kind.removeprefix(_ARRAY)
        if self.kind not in _ENCODERS and (dtype == self.kind or dtype not in _TYPES):
            kinds = ", ".join(_ENCODERS)
            raise ConfigurationError(
                f"the field {self.name!r} has the kind {self.kind!r}: it is one of {kinds}, or "
                f"array: with one of {', '.join(_TYPES)}"
            )
        if re.fullmatch(r"[^\x00-\x1f]{1,200}", self.name) is None:
            raise ConfigurationError(f"{self.name[:50]!r} cannot be the name of a field")

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The type of an array's elements, little-endian; None for other kinds."""
        if not self.kind.startswith(_ARRAY):
            return None
        return np.dtype(self.kind.removeprefix(_ARRAY)).newbyteorder("<")


def fields_of(kinds: dict[str, str]) -> list[Field]:
    if not kinds:
        raise ConfigurationError("a sample has at least one field")
    return [Field(name, kind) for name, kind in kinds.items()]


class JsonText(bytes):
    """The text of a JSON value, which was checked when it was read."""


def _bytes(value: Any) -> bytes:
    if isinstance(value, int):  # bytes(5) would be five zeros
        raise TypeError("it is a number, and no bytes")
    return bytes(value)


def _bool(value: Any) -> bytes:
    if value not in (True, False):
        raise ValueError("it is neither true nor false")
    return b"\1" if value else b"\0"


def _files(value: dict[str, bytes]) -> bytes:
    contents = [bytes(memoryview(one)) for one in value.values()]
    sizes = [[name, len(content)] for name, content in zip(value, contents, strict=True)]
    names = json.dumps(sizes).encode()
    return _SIZE.pack(len(names)) + names + b"".join(contents)


def _as_files(value: memoryview) -> dict[str, bytes]:
    (size,) = _SIZE.unpack(value[:4])
    found, at = {}, 4 + size
    for name, length in json.loads(bytes(value[4:at])):
        found[name] = bytes(value[at : at + length])
        at += length
    return found


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_as_text).encode()


def _as_text(value: Any) -> str:
    """The text of a date, a decimal and the like. Other types are refused: text would not do."""
    if isinstance(value, date | time | timedelta | Decimal | UUID):
        return str(value)
    raise TypeError(f"JSON has no {type(value).__name__}")


_ENCODERS: Final[dict[str, Callable[[Any], bytes]]] = {
    "bytes": _bytes,
    "text": str.encode,
    "json": lambda value: value if isinstance(value, JsonText) else _json(value),
    "int64": _INTEGER.pack,
    "float64": _FLOAT.pack,
    "bool": _bool,
    "files": _files,
}
_DECODERS: Final[dict[str, Callable[[memoryview], Any]]] = {
    "bytes": bytes,
    "text": lambda value: str(value, "utf-8"),
    "json": lambda value: json.loads(bytes(value)),
    "int64": lambda value: _INTEGER.unpack(value)[0],
    "float64": lambda value: _FLOAT.unpack(value)[0],
    "bool": lambda value: value[0] == 1,
    "files": _as_files,
}


def encoder(fields: Sequence[Field]) -> Callable[[Any], bytes]:
    """A function from a sample to its bytes. It raises BadSource if a value does not fit."""
    kinds = [(field.name, _encoder(field)) for field in fields]

    def one(name: str, encode: Callable[[Any], bytes], sample: dict[str, Any]) -> bytes | None:
        value = sample.get(name)
        try:
            return None if value is None else encode(value)
        except (TypeError, ValueError, struct.error, RecursionError) as problem:
            raise BadSource(f"the value of {name!r} does not fit its field: {problem}") from None

    def whole(sample: Any) -> bytes:
        return one(fields[0].name, kinds[0][1], {fields[0].name: sample}) or b""

    def several(sample: dict[str, Any]) -> bytes:
        if len(kinds) == 1:
            value = one(*kinds[0], sample)
            if value is None:
                raise BadSource(f"a sample has no {kinds[0][0]!r}, its only field")
            return value
        values = [one(name, encode, sample) for name, encode in kinds]
        if any(value is not None and len(value) >= _MISSING for value in values):
            raise BadSource("a value has 4 GiB or more")
        sizes = [_MISSING if value is None else len(value) for value in values]
        return struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(one or b"" for one in values)

    return whole if is_json(fields) else several


def is_json(fields: Sequence[Field]) -> bool:
    """Whether a sample is a single JSON value instead of a dict of fields."""
    return [field.kind for field in fields] == ["json"]


def decoder(fields: Sequence[Field]) -> Callable[[memoryview], Any]:
    """A function from a sample's bytes to a dict of its fields, or to its single JSON value."""
    kinds = [(field.name, _decoder(field)) for field in fields]
    if len(kinds) == 1:
        name, decode = kinds[0]
        if is_json(fields):
            return decode
        return lambda sample: {name: decode(sample)}
    sizes = struct.Struct(f"<{len(kinds)}I")

    def several(sample: memoryview) -> dict[str, Any]:
        found: dict[str, Any] = {}
        at = sizes.size
        for (name, decode), size in zip(kinds, sizes.unpack(sample[:at]), strict=True):
            if size == _MISSING:
                found[name] = None
            else:
                found[name] = decode(sample[at : at + size])
                at += size
        return found

    return several


def _encoder(field: Field) -> Callable[[Any], bytes]:
    dtype = field.dtype
    if dtype is None:
        return _ENCODERS[field.kind]
    return lambda value: as_array(value, dtype).tobytes()


def _decoder(field: Field) -> Callable[[memoryview], Any]:
    dtype = field.dtype
    if dtype is None:
        return _DECODERS[field.kind]
    # A copy, because the read buffer is used again.
    return lambda value: np.frombuffer(value, dtype).copy()


# ---- numbers as an array, with the same bytes on every CPU ---------------------------------------
# Two conversions differ between CPUs. A float outside an integer type's range becomes the nearest
# integer of that type on aarch64, and another integer on x86_64. A converted NaN has other bits.
# Besides, numpy makes floats of a list of large integers. So here integers stay integers, a float's
# range is checked before its cast, and every converted NaN becomes the same NaN.


def as_array(value: Any, dtype: np.dtype[Any]) -> Array:
    """Converts numbers to an array of this type. Integers stay exact; floats may be rounded.

    Raises ValueError if a number does not fit.
    """
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return _from_elements(value, dtype)
    given = np.asarray(value)  # a value without a numeric type is refused below
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
    # Integers and floats together, or negative integers and integers above 2^63: no numpy type
    # holds all of them exactly.
    return np.concatenate([_from_elements([one], dtype) for one in values])


def _integers(values: list[int]) -> Array | None:
    """An array of int64 or uint64; None if neither type holds all values."""
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
    """Converts floats to this integer type. Raises ValueError unless each is such an integer."""
    wide = given.astype(np.float64)
    bounds = np.iinfo(dtype)
    # Both bounds are powers of two or 0, so they are exact as floats; bounds.max may not be.
    inside = (wide >= float(bounds.min)) & (wide < float(bounds.max + 1))
    if not bool((inside & (np.trunc(wide) == wide)).all()):
        raise _unfit(dtype)
    return wide.astype(dtype)


def _unfit(dtype: np.dtype[Any]) -> ValueError:
    return ValueError(f"an element does not fit {dtype.name}")
