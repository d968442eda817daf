"""Buffers and keys that are overwritten after use."""

from __future__ import annotations

from sealring import _native

# Classes: every set-up message passes through several, and a generator takes five times as long.


class Erased:
    """Gives the buffer, and overwrites it at the end of the block."""

    __slots__ = ("_raw",)

    def __init__(self, raw: bytearray) -> None:
        self._raw = raw

    def __enter__(self) -> bytearray:
        return self._raw

    def __exit__(self, *_: object) -> None:
        _native.erase(self._raw)


class Wiped:
    """Wipes the key at the end of the block, even if other references to it remain."""

    __slots__ = ("_key",)

    def __init__(self, key: _native.Secret) -> None:
        self._key = key

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._key.wipe()
