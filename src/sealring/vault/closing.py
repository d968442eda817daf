"""What holds keys, files or threads until it is closed, and is of no use afterwards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

from sealring.errors import AlreadyClosed


class Closable(ABC):
    """Usable until `close()`, or until the end of its `with` block.

    What describes it, such as its name, stays readable. All that needs a key or a file raises
    AlreadyClosed. A thread that uses it must have ended, or must expect that error.
    """

    _closed = False
    _what: str
    """For the error, such as "the loader"."""
    _instead: ClassVar[str] = "open it again"

    def close(self) -> None:
        """Wipes its keys, closes its files and ends its threads. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._release()

    def require_open(self) -> None:
        if self._closed:
            raise AlreadyClosed(f"{self._what} was closed: {self._instead}")

    def __enter__(self) -> Self:
        self.require_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _release(self) -> None:
        """Called once."""
