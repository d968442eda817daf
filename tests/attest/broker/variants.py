"""Makes variants of a JSON value, each with one thing changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


def variants(value: Any, of_leaf: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    """Leaves out, misnames or changes each member. `of_leaf` changes values that are no objects."""
    if not isinstance(value, dict):
        yield from of_leaf(value)
        return
    for name in value:
        yield {other: value[other] for other in value if other != name}
        yield {**value, f"{name}x": 1}
        for changed in variants(value[name], of_leaf):
            yield {**value, name: changed}
