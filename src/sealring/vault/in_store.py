"""A vault in a store: see `storage.Storage`."""

from __future__ import annotations

import re
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

from sealring.errors import MissingPart, NotAVault, OutputExists, UnsafePath
from sealring.vault.stores import StorePath

_TAKEN: Final = "taken"


class StoreFile:
    """A file of a store, of which ranges are read."""

    def __init__(self, path: StorePath, name: str, size: int) -> None:
        self._path, self._name, self.size = path, name, size
        self.source = self.read

    def read(self, offset: int, size: int) -> bytes:
        try:
            return self._path.store.read_range(self._path.key, offset, offset + size)
        except FileNotFoundError:  # it was removed since it was opened
            raise _missing(self._path, self._name) from None

    def close(self) -> None:
        """A range is a request of its own: nothing is open between two of them."""


class InStore:
    """See `storage.Storage`."""

    locks: Final = False

    def entries(self, folder: StorePath, form: re.Pattern[str]) -> list[StorePath]:
        return [folder / name for name in folder.store.names(folder.key, form)]

    def below(self, folder: StorePath) -> list[str] | None:
        return folder.store.below(folder.key)

    def links(self, folder: StorePath, form: re.Pattern[str]) -> list[UnsafePath]:
        return []

    def refuse_link(self, path: StorePath) -> None:
        """A store has none."""

    def exists(self, path: StorePath) -> bool:
        return path.store.size(path.key) is not None

    def has_folder(self, path: StorePath) -> bool:
        return bool(path.store.names(path.key, re.compile(".+")))

    def read_small(self, path: StorePath, what: str, largest: int) -> bytes:
        try:
            content = path.store.read_unless_larger(path.key, largest)
        except FileNotFoundError:
            raise NotAVault(f"{what} {path} cannot be read: No such file") from None
        if content is None:
            raise NotAVault(f"{what} {path} is larger than {largest} bytes")
        return content

    def write(self, path: StorePath, content: bytes) -> None:
        path.store.put(path.key, content, new=False)

    def write_new(self, path: StorePath, content: bytes) -> None:
        path.store.put(path.key, content, new=True)

    def make_vault(self, path: StorePath, name: str, header: bytes) -> None:
        try:
            self.write_new(path / name, header)
        except FileExistsError:  # another process has just made it
            raise OutputExists(f"{path} is there already and will not be overwritten") from None

    def make_folder(self, folder: StorePath) -> None:
        """A folder is there when something is in it."""

    def take_folder(self, folder: StorePath) -> None:
        if self.has_folder(folder):
            raise FileExistsError(str(folder))
        # Random, so that a repeated put knows its own: see Store.put.
        self.write_new(folder / _TAKEN, secrets.token_hex(16).encode())

    @contextmanager
    def new_file(self, path: StorePath) -> Iterator[int]:
        """What is sealed goes to a file without a name, and then to the store."""
        with tempfile.TemporaryFile() as file:
            yield file.fileno()
            if self.exists(path):
                raise FileExistsError(str(path))
            path.store.upload(file.fileno(), path.key)

    def open_file(self, path: StorePath, name: str) -> StoreFile:
        size = path.store.size(path.key)
        if size is None:
            raise _missing(path, name)
        return StoreFile(path, name, size)

    def settle(self, folder: StorePath, unsynced: str) -> None:
        """What was put is there."""

    def remove(self, root: StorePath, folder: StorePath, first: str | None = None) -> None:
        if first is not None:
            folder.store.remove((folder / first).key)
        folder.store.remove(folder.key)

    def held(self, path: StorePath, *, alone: bool, wait: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def claim(self, folder: StorePath) -> AbstractContextManager[None]:
        return nullcontext()

    def claimed(self, folder: StorePath, *, superseded: bool) -> bool:
        """A store does not know who writes: what no later version follows may be in use."""
        return not superseded


def _missing(path: StorePath, name: str) -> MissingPart:
    return MissingPart(f"{name} is missing: restore {path} from a copy")
