"""Where a vault lies: in a directory, or in a folder of a store. All that differs is here."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

from sealring.errors import UnsafePath
from sealring.vault.disk import Disk
from sealring.vault.in_store import InStore
from sealring.vault.stores import Store, StorePath

if TYPE_CHECKING:
    VaultPath = Path
else:
    VaultPath = Path | StorePath
"""A StorePath has those of Path's methods by which vaults find their way. Others it has not, so
that no code takes it for a file of this machine."""
_Path = TypeVar("_Path", Path, StorePath)


class OpenFile(Protocol):
    """A file of a vault that is open for reading."""

    size: int

    @property
    def source(self) -> int | Callable[[int, int], bytes]:
        """What `_native.SealedFileReader` reads from."""

    def read(self, offset: int, size: int) -> bytes: ...

    def close(self) -> None: ...


class Storage(Protocol[_Path]):
    @property
    def locks(self) -> bool:
        """Whether `held` and `claim` keep other processes out."""

    def entries(self, folder: _Path, form: re.Pattern[str]) -> list[_Path]:
        """Folders whose name is of this form; other names are not the vault's."""

    def below(self, folder: _Path) -> list[str] | None:
        """All files below a folder, as paths from it; None where each is to be looked at."""

    def links(self, folder: _Path, form: re.Pattern[str]) -> list[UnsafePath]:
        """An error for each symlink with a name of this form: `entries` leaves them out."""

    def refuse_link(self, path: _Path) -> None: ...

    def exists(self, path: _Path) -> bool:
        """Whether a file is there."""

    def has_folder(self, path: _Path) -> bool: ...

    def read_small(self, path: _Path, what: str, largest: int) -> bytes:
        """A file that is read whole, if it is no larger."""

    def write(self, path: _Path, content: bytes) -> None:
        """The file appears whole or not at all, replaces an older one, and survives a crash."""

    def write_new(self, path: _Path, content: bytes) -> None:
        """A file that survives a crash after `settle`."""

    def make_vault(self, path: _Path, name: str, header: bytes) -> None:
        """A folder with a header that was not there; whole, or not at all."""

    def make_folder(self, folder: _Path) -> None: ...

    def take_folder(self, folder: _Path) -> None:
        """FileExistsError if it is there: no two processes take one."""

    def new_file(self, path: _Path) -> AbstractContextManager[int]:
        """A descriptor to write to. If the context ends well, the file is there for good."""

    def open_file(self, path: _Path, name: str) -> OpenFile:
        """MissingPart if it is not there."""

    def settle(self, folder: _Path, unsynced: str) -> None:
        """A copy, with its file `unsynced` and the folders above, now survives a crash."""

    def remove(self, root: _Path, folder: _Path, first: str | None = None) -> None:
        """Removes a folder, if it is there; `first`: the file in it that goes before all others."""

    def held(self, path: _Path, *, alone: bool, wait: bool) -> AbstractContextManager[None]: ...

    def claim(self, folder: _Path) -> AbstractContextManager[None]:
        """Says that this process works there."""

    def claimed(self, folder: _Path, *, superseded: bool) -> bool:
        """Whether a process may be working there; `superseded`: a later version is complete."""


_DISK: Final = Disk()
_IN_STORE: Final = InStore()


def storage_of(path: VaultPath) -> Storage[Any]:
    return _IN_STORE if isinstance(path, StorePath) else _DISK


def vault_path(given: VaultPath | str) -> VaultPath:
    """A directory, or what a URL names."""
    if isinstance(given, Path | StorePath):
        return given
    return cast("VaultPath", StorePath(Store(given))) if "://" in given else Path(given)
