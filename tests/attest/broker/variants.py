"""A JSON value with one thing in it changed, for each thing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


def variants(value: Any, of_leaf: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    """Each member left out, given a wrong name, or changed; `of_leaf` changes all but objects."""
    if not isinstance(value, dict):
        yield from of_leaf(value)
        return
    for name in value:
        yield {other: value[other] for other in value if other != name}
        yield {**value, f"{name}x": 1}
        for changed in variants(value[name], of_leaf):
            yield {**value, name: changed}
