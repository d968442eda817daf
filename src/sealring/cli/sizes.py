"""Sizes as people write them."""

from __future__ import annotations

import re
from typing import Final

from sealring.errors import ConfigurationError

_UNITS: Final = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def parse_bytes(text: str) -> int:
    """Bytes in "4096", "4KiB" or "25MiB"."""
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or int(match[1]) == 0:
        raise ConfigurationError(f"{text!r} is not a size; write bytes, or 4KiB, 25MiB, 1GiB")
    return int(match[1]) * unit
