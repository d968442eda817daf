"""Reads binary evidence from front to back. Running out of bytes is the sender's mistake."""

from __future__ import annotations

from typing import Literal

from sealring.errors import MalformedEvidence


class Cursor:
    def __init__(self, data: bytes, what: str, order: Literal["little", "big"]) -> None:
        self._data, self._what, self._order = data, what, order
        self._at = 0

    @property
    def at(self) -> int:
        return self._at

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise MalformedEvidence(f"{self._what} is cut: {size} bytes wanted at {self._at}")
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), self._order)

    def sized(self, size_bytes: int) -> bytes:
        """Bytes behind their own count."""
        return self.take(self.number(size_bytes))

    def end(self) -> None:
        if self.left:
            raise MalformedEvidence(f"{self._what} has {self.left} bytes too many")
