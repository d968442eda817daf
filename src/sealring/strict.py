"""Dataclasses as JSON, read back strictly: what is missing, left over or of another type fails.

Files come from anywhere. After this, the holder of a dataclass knows that every field is of
its declared type, and every number finite and not negative.
"""

from __future__ import annotations

import dataclasses
import types
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from sealring.errors import ConfigurationError


def strictly(wanted: Any, value: Any, where: str, document: str) -> Any:
    """`value` as the type `wanted`; an error says `where` it is not what a `document` has."""
    origin = get_origin(wanted)
    if dataclasses.is_dataclass(wanted) and isinstance(value, dict):
        kind: Any = wanted
        hints = _fields(kind)
        if value.keys() == hints.keys():
            return kind(
                **{
                    key: strictly(hints[key], value[key], f"{where}: {key}", document)
                    for key in hints
                }
            )
    elif origin is list and isinstance(value, list):
        (item,) = get_args(wanted)
        return [
            strictly(item, each, f"{where}[{index}]", document) for index, each in enumerate(value)
        ]
    elif origin is Literal and isinstance(value, str) and value in get_args(wanted):
        return value
    elif origin in (Union, types.UnionType):
        present, _ = get_args(wanted)
        return None if value is None else strictly(present, value, where, document)
    elif wanted in (str, bool) and type(value) is wanted:
        return value
    elif wanted in (int, float) and type(value) is wanted and 0 <= value < 1 << 63:
        return value  # a NaN is not between any two numbers
    raise ConfigurationError(f"{where} is not what a {document} has there")


@cache
def _fields(kind: Any) -> dict[str, Any]:
    """Evaluated once for each class: a checkpoint has thousands of entries of the same one."""
    return get_type_hints(kind)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json.loads: readers differ in what an object means that has a key twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found
