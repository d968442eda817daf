"""Where a vault lies: in a directory, or in a folder of a store (stores.py).

The owner of the disk can put anything there. A file that cannot be read raises a VaultError that
names it.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path, PosixPath
from typing import Final, Protocol, Self

from sealring.errors import MissingPart, NotAVault, UnsafePath
from sealring.formats.files import NEW_FILE
from sealring.vault import files
from sealring.vault.sealed import Source, raise_own_lack, read_small


class OpenFile:
    """A file of a vault that is open for reading."""

    def __init__(self, source: Source, size: int) -> None:
        self.source, self.size = source, size

    def read(self, offset: int, size: int) -> bytes:
        if isinstance(self.source, int):
            return os.pread(self.source, size, offset)
        return self.source(offset, size)

    def close(self) -> None:
        """Closes the file's descriptor. A store has none: nothing is open between requests."""
        if isinstance(self.source, int) and self.source >= 0:
            os.close(self.source)
            self.source = -1


class VaultPath(Protocol):
    """A file or a folder of a vault, with all operations on it."""

    @property
    def locks(self) -> bool:
        """Whether `held` and `claim` really lock. A store has no locks."""

    @property
    def local(self) -> Path:
        """The path on this machine. Raises Unsupported in a store."""

    @property
    def name(self) -> str: ...

    @property
    def parent(self) -> VaultPath: ...

    def __truediv__(self, name: str, /) -> VaultPath: ...

    def absolute(self) -> VaultPath: ...

    def resolve(self) -> VaultPath: ...

    def entries(self, form: re.Pattern[str]) -> list[VaultPath]:
        """The folders here whose names have this form; other names are not the vault's."""

    def below(self) -> list[str] | None:
        """All files below a folder, as paths relative to it; None if one listing cannot tell."""

    def links(self, form: re.Pattern[str]) -> list[UnsafePath]:
        """One error for each symlink with a name of this form; `entries` leaves symlinks out."""

    def refuse_link(self) -> None: ...

    def has_file(self) -> bool:
        """Whether a file exists at this path."""

    def has_folder(self) -> bool: ...

    def read_small(self, what: str, largest: int) -> bytes:
        """Reads a whole file. Raises NotAVault if it is larger than `largest` bytes."""

    def write(self, content: bytes) -> None:
        """Writes a file whole or not at all. It replaces an older one and survives a crash."""

    def write_new(self, content: bytes) -> None:
        """Writes a new file, which survives a crash only after `settle`."""

    def make_vault(self, name: str, header: bytes) -> None:
        """Makes a new folder with a header in it, whole or not at all."""

    def make_folder(self) -> None: ...

    def take_folder(self) -> None:
        """Makes a folder. Raises FileExistsError if it exists: no two processes can take it."""

    def new_file(self) -> AbstractContextManager[int]:
        """The descriptor of a new file. If the context ends without an error, the file lasts."""

    def open_file(self, name: str) -> OpenFile:
        """Opens a file for reading. Raises MissingPart if it does not exist."""

    def settle(self, unsynced: str) -> None:
        """Makes a copy survive a crash, with its file `unsynced` and the folders above."""

    def remove(self, levels: int, first: str | None = None) -> None:
        """Removes a folder, if it exists, that lies `levels` levels below the vault's folder.

        `first`: the file in it that is removed before all others.
        """

    def held(self, *, alone: bool, wait: bool) -> AbstractContextManager[None]: ...

    def claim(self) -> AbstractContextManager[None]:
        """Marks the folder as in use by this process until the context ends."""

    def claimed(self, *, superseded: bool) -> bool:
        """Whether a process may be working there. `superseded`: a later version is complete."""


class LocalPath(PosixPath):
    """A VaultPath in a local directory. It follows no symlinks below the vault, and it locks."""

    locks: Final = True

    @property
    def local(self) -> Self:
        return self

    def entries(self, form: re.Pattern[str]) -> list[VaultPath]:
        """The folders here. Raises UnsafePath if this is a symlink, which may lead elsewhere."""
        try:
            self.refuse_link()
            with os.scandir(self) as found:
                names = [
                    one.name
                    for one in found
                    if form.fullmatch(one.name) and one.is_dir(follow_symlinks=False)
                ]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as problem:
            raise _unreadable(self, problem) from problem
        return [self / name for name in sorted(names)]

    def below(self) -> None:
        return None

    def links(self, form: re.Pattern[str]) -> list[UnsafePath]:
        if not self.is_dir():
            return []
        with os.scandir(self) as found:
            names = sorted(
                one.name for one in found if form.fullmatch(one.name) and one.is_symlink()
            )
        return [_link(self / name) for name in names]

    def refuse_link(self) -> None:
        if self.is_symlink():
            raise _link(self)

    def has_file(self) -> bool:
        try:
            os.lstat(self)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as problem:
            raise _unreadable(self.parent, problem) from problem
        return True

    def has_folder(self) -> bool:
        return self.is_dir()

    def read_small(self, what: str, largest: int) -> bytes:
        return read_small(self, what, largest)

    def write(self, content: bytes) -> None:
        files.write_file(self, content)

    def write_new(self, content: bytes) -> None:
        files.write_new(self, content)

    def make_vault(self, name: str, header: bytes) -> None:
        temporary = files.beside(self)
        try:
            temporary.mkdir(mode=0o700)
            (temporary / "objects").mkdir(mode=0o700)
            files.write_file(temporary / name, header)
            files.move_into_place(temporary, self)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def make_folder(self) -> None:
        try:
            with files.named(self):
                self.mkdir(mode=0o700, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise UnsafePath(
                f"{self} cannot be made: something that is no directory lies there, or in the "
                "place of one above it. Remove it"
            ) from None

    def take_folder(self) -> None:
        with files.named(self):
            self.mkdir(mode=0o700)

    @contextmanager
    def new_file(self) -> Iterator[int]:
        with files.named(self):
            file = os.open(self, NEW_FILE, 0o600)
            try:
                yield file
                os.fsync(file)
            finally:
                os.close(file)

    def open_file(self, name: str) -> OpenFile:
        try:
            file = os.open(self, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            raise MissingPart(f"{name} is missing: restore {self} from a copy") from None
        except OSError as problem:
            raise_own_lack(problem)
            raise UnsafePath(f"{name} cannot be read: {self}: {problem.strerror}") from None
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            os.close(file)
            raise UnsafePath(f"{name} cannot be read: {self} is not a regular file")
        return OpenFile(file, status.st_size)

    def settle(self, unsynced: str) -> None:
        with files.named(self):
            files.sync_together([self / unsynced, self, *self.parents[:3]])

    def remove(self, levels: int, first: str | None = None) -> None:
        files.remove_directory(self.parents[levels - 1], self, first)

    def held(self, *, alone: bool, wait: bool) -> AbstractContextManager[None]:
        return files.locked(self / "lock", shared=not alone, wait=wait)

    def claim(self) -> AbstractContextManager[None]:
        return files.claim(self)

    def claimed(self, *, superseded: bool) -> bool:
        return files.claimed(self)


def _link(path: Path) -> UnsafePath:
    return UnsafePath(f"{path} is a symlink: a vault has none. Put the directory itself there")


def _unreadable(path: Path, problem: OSError) -> NotAVault:
    raise_own_lack(problem)
    return NotAVault(f"{path} cannot be read: {problem.strerror}")
