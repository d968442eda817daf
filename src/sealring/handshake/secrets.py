"""Buffers and keys that are overwritten after use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sealring import _native


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
