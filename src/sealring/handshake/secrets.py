"""Keys in set-up messages, without copies that cannot be overwritten.

A message with a key is JSON like every other. Its text is written and read in a bytearray; what
becomes a `str` has zeros where the key is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from sealring import _native
from sealring.handshake.messages import encode_message
from sealring.limits import KEY_BYTES

NO_KEY: Final = "0" * (2 * KEY_BYTES)
"""What stands in the place of the key. It is not a key itself: a key of zeros is refused."""


@contextmanager
def erased(raw: bytearray) -> Iterator[bytearray]:
    """The buffer, which is overwritten at the end."""
    try:
        yield raw
    finally:
        _native.erase(raw)


@contextmanager
def wiped(key: _native.Secret) -> Iterator[None]:
    """Wipes the key at the end of the block, even if other references to it remain."""
    try:
        yield
    finally:
        key.wipe()


def write_key(message: Mapping[str, Any], field: str, key: _native.Secret) -> bytearray:
    raw = bytearray(encode_message({**message, field: NO_KEY}))
    start = raw.index(f'"{field}":"{NO_KEY}"'.encode()) + len(field) + 4
    with memoryview(raw) as view, view[start : start + len(NO_KEY)] as place:
        key.write_hex(place)
    return raw


def take_key(raw: bytearray, field: str) -> _native.Secret | None:
    """The key of a message, in which zeros take its place; None if it has none there.

    Whether the place is that field is for the parser to say: it must then find `NO_KEY` in it.
    """
    pattern = rb'"%b"\s*:\s*"([0-9a-f]{%d})"' % (field.encode(), 2 * KEY_BYTES)
    found = re.search(pattern, raw)
    if found is None:
        return None
    start, end = found.span(1)
    del found  # a bytearray that something refers to cannot be changed in length
    with memoryview(raw) as view, view[start:end] as place:
        key = _native.Secret.from_hex(place)
        place[:] = NO_KEY.encode()
    return key
