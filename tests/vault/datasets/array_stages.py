"""A pipeline from numbered JSON lines to arrays."""

from __future__ import annotations

from typing import Any

from sealring.vault import Stage

WIDTH = 9000
"""Elements: a sample has parts of several chunks."""


def equal(sample: dict[str, Any]) -> dict[str, Any]:
    return {"values": [sample["n"] / 7 + place for place in range(WIDTH)]}


def short(sample: dict[str, Any]) -> dict[str, Any]:
    return {"values": [sample["n"], -1]}


def empty(sample: dict[str, Any]) -> dict[str, Any]:
    return {"values": []}


def ragged(sample: dict[str, Any]) -> dict[str, Any]:
    return {"values": list(range(sample["n"]))}


def two(sample: dict[str, Any]) -> dict[str, Any]:
    return {"values": [1], "n": sample["n"]}


STAGES = [
    Stage("equal", "raw", equal, {"values": "array:float32"}),
    Stage("short", "raw", short, {"values": "array:int64"}),
    Stage("empty", "raw", empty, {"values": "array:float32"}),
    Stage("ragged", "raw", ragged, {"values": "array:int16"}),
    Stage("two", "raw", two, {"values": "array:int16", "n": "int64"}),
]
