"""Sizes and numbers of ranks as people write them on a command line."""

from __future__ import annotations

import re

from sealring.errors import ConfigurationError

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_MAX_RANKS = 64


def parse_size(text: str) -> int:
    """Bytes in "4096", "4KiB" or "25MiB"; a multiple of 4, as the benchmark reduces float32."""
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ConfigurationError(f"{text!r} is not a size; write bytes, or 4KiB, 25MiB, 1GiB")
    size = int(match[1]) * unit
    if size == 0 or size % 4:
        raise ConfigurationError(f"a size of {size} bytes is not a whole number of float32 values")
    return size


def parse_world_sizes(text: str) -> list[int]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ConfigurationError(f"{text!r} is not a list of world sizes; write 2,3,4,8")
    return [check_ranks(int(part)) for part in text.split(",")]


def check_ranks(ranks: int) -> int:
    if not 2 <= ranks <= _MAX_RANKS:
        raise ConfigurationError(f"{ranks} ranks: the benchmark runs 2 to {_MAX_RANKS} of them")
    return ranks
