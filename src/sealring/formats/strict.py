"""The one reader of untrusted JSON, and of dataclasses and base64 in it.

`read_json` bounds size and depth, and refuses what readers treat differently: a doubled key, a
number that is not finite. Ruff's TID251 refuses `json.loads` elsewhere. `strictly` makes a
dataclass from a JSON value, and guarantees that nothing was missing or left over, every field has
its declared type, every text is Unicode, and every number is finite and not negative. `read_as`
does both.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import types
from collections.abc import Callable
from functools import cache
from typing import (
    Any,
    Final,
    Literal,
    NoReturn,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from sealring.errors import ConfigurationError, SealringError

T = TypeVar("T")
MAX_BYTES: Final = 512 << 20
"""The longest text that is read. Callers that know more set a lower limit."""
MAX_DEPTH: Final = 64

Numbers: TypeAlias = Literal["finite", "whole", "any"]
"""Which numbers are accepted. "any" is for a user's own samples, in which Python writes NaN."""


def read_json(
    data: bytes | bytearray | str, limit: int = MAX_BYTES, numbers: Numbers = "finite"
) -> Any:
    """Reads JSON in UTF-8. Its ValueError says what is wrong with the text."""
    if len(data) > limit:
        raise ValueError(f"it has more than {limit} bytes")
    text = data if isinstance(data, str) else data.decode()
    try:
        value = _DECODERS[numbers].decode(text)
    except RecursionError:
        raise _too_deep() from None
    if type(value) in (dict, list) and text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value)
    return value


def read_object(data: bytes | str, refusal: Exception, limit: int = MAX_BYTES) -> dict[str, Any]:
    """Reads a JSON object, or raises `refusal`."""
    try:
        value = read_json(data, limit)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise refusal
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for one in level
            for inner in (one.values() if type(one) is dict else one)
            if type(inner) is dict or type(inner) is list
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError("it is nested too deeply")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _no_such_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:40]} is not a number that is used")


# Made once, because making a decoder takes longer than reading a short message.
_DECODERS: Final[dict[Numbers, json.JSONDecoder]] = {
    "any": json.JSONDecoder(object_pairs_hook=_unique_keys),
    "finite": json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_no_such_number),
    "whole": json.JSONDecoder(
        object_pairs_hook=_unique_keys,
        parse_constant=_no_such_number,
        parse_float=_no_such_number,
    ),
}


def read_as(
    wanted: type[T],
    data: bytes | str,
    where: str,
    document: str,
    error: type[SealringError] = ConfigurationError,
    limit: int = MAX_BYTES,
) -> T:
    """Reads JSON text as the type `wanted`. Raises `error`, which says what is wrong with it."""
    try:
        value = read_json(data, limit)
    except ValueError as problem:
        raise error(f"{where} is not JSON that can be used: {problem}") from None
    return strictly(wanted, value, where, document, error)


def strictly(
    wanted: type[T],
    value: Any,
    where: str,
    document: str,
    error: type[SealringError] = ConfigurationError,
) -> T:
    """Reads a JSON value as the type `wanted`. `error` says `where` it is not like a `document`."""
    try:
        reader: Callable[[Any], T] = _reader(cast("Any", wanted))
        found = reader(value)
    except _Wrong as wrong:
        path = "".join(reversed(wrong.path))
        raise error(f"{where}{path} is not what a {document} has there") from None
    except ConfigurationError as problem:  # from a dataclass that checks its own fields
        raise error(str(problem)) from None
    return found


class _Wrong(Exception):
    """A value has the wrong type. Each reader on the way out adds its place, innermost first."""

    def __init__(self) -> None:
        self.path: list[str] = []


@cache
def _reader(wanted: Any) -> Callable[[Any], Any]:
    """The reader of a type, cached: annotations are slow to evaluate, and audits read thousands."""
    origin = get_origin(wanted)
    if dataclasses.is_dataclass(wanted):
        return _dataclass_reader(wanted)
    if origin is list:
        return _list_reader(_reader(get_args(wanted)[0]))
    if origin is Literal:
        return _literal_reader(frozenset(get_args(wanted)))
    if origin in (Union, types.UnionType):
        present, _ = get_args(wanted)
        return _optional_reader(_reader(present))
    if wanted in (str, bool):
        return _plain_reader(wanted)
    if wanted in (int, float):
        return _number_reader(wanted)
    return _nothing


def _dataclass_reader(wanted: Any) -> Callable[[Any], Any]:
    hints = get_type_hints(wanted)
    names = [field.name for field in dataclasses.fields(wanted)]
    readers = [(name, _reader(hints[name])) for name in names]

    def read(value: Any) -> Any:
        if not isinstance(value, dict) or len(value) != len(names):
            raise _Wrong
        found: list[Any] = []
        try:
            for name, reader in readers:
                found.append(reader(value[name]))
        except KeyError:
            raise _Wrong from None
        except _Wrong as wrong:
            wrong.path.append(f": {names[len(found)]}")
            raise
        return wanted(*found)

    return read


def _list_reader(item: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, list):
            raise _Wrong
        found: list[Any] = []
        try:
            for each in value:
                found.append(item(each))
        except _Wrong as wrong:
            wrong.path.append(f"[{len(found)}]")
            raise
        return found

    return read


def _literal_reader(words: frozenset[Any]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, str) or value not in words:
            raise _Wrong
        return value

    return read


def _optional_reader(present: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else present(value)


def _plain_reader(wanted: Any) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) is not wanted or not (wanted is bool or _is_unicode(value)):
            raise _Wrong
        return value

    return read


def _is_unicode(text: str) -> bool:
    """Whether the text can be encoded: JSON's escapes can name half of a surrogate pair."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _number_reader(wanted: Any) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        # A NaN is not between any two numbers.
        if type(value) is not wanted or not 0 <= value < 1 << 63:
            raise _Wrong
        return value

    return read


def _nothing(value: Any) -> Any:
    raise _Wrong


def encode_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def decode_base64(text: str, what: str, error: Callable[[str], SealringError]) -> bytes:
    """Decodes base64. Only the one canonical spelling is accepted."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if not data or encode_base64(data) != text:
        raise error(f"{what} is not base64")
    return data
