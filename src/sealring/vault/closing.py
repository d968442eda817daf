"""The base class of objects that hold keys, files or threads until they are closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

from sealring.errors import AlreadyClosed


class Closable(ABC):
    """Usable until `close()`, or until the end of its `with` block.

    After that its name and other descriptions stay readable, and every use that needs a key or a
    file raises AlreadyClosed. End threads that use it first, or let them expect that error.
    """

    _closed = False
    _what: str
    """How the error names this object, such as "the loader"."""
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
        """Wipes keys, closes files, ends threads. `close` calls it once."""
