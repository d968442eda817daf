"""Dataclasses as JSON, read back strictly: what is missing, left over or of another type fails.

Files come from anywhere. After this, the holder of a dataclass knows that every field is of
its declared type, every text Unicode, and every number finite and not negative.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from sealring.errors import ConfigurationError


def strictly(wanted: Any, value: Any, where: str, document: str) -> Any:
    """`value` as the type `wanted`; an error says `where` it is not what a `document` has."""
    try:
        return _reader(wanted)(value)
    except _Wrong as wrong:
        path = "".join(reversed(wrong.path))
        raise ConfigurationError(f"{where}{path} is not what a {document} has there") from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json.loads: readers differ in what an object means that has a key twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


class _Wrong(Exception):
    """Something is of another type. Each reader that it passes adds where it was, inmost first."""

    def __init__(self) -> None:
        self.path: list[str] = []


@cache
def _reader(wanted: Any) -> Callable[[Any], Any]:
    """Made once for each type: annotations are slow to evaluate, and an audit reads thousands."""
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
    """Whether it can be written: JSON's escapes can name half of a surrogate pair."""
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
