"""Where a vault lies: in a directory, or in a folder of a store (stores.py).

The owner of the disk can put anything there. What cannot be read is a VaultError that names it.
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
        """In a store nothing is open between two requests."""
        if isinstance(self.source, int) and self.source >= 0:
            os.close(self.source)
            self.source = -1


class VaultPath(Protocol):
    """A file or a folder of a vault, and all that is done with it."""

    @property
    def locks(self) -> bool:
        """Whether `held` and `claim` keep other processes out. A store has no locks."""

    @property
    def local(self) -> Path:
        """The path on this machine; Unsupported in a store."""

    @property
    def name(self) -> str: ...

    @property
    def parent(self) -> VaultPath: ...

    def __truediv__(self, name: str, /) -> VaultPath: ...

    def absolute(self) -> VaultPath: ...

    def resolve(self) -> VaultPath: ...

    def entries(self, form: re.Pattern[str]) -> list[VaultPath]:
        """Folders whose name is of this form; other names are not the vault's."""

    def below(self) -> list[str] | None:
        """All files below a folder, as paths from it; None where each is to be looked at."""

    def links(self, form: re.Pattern[str]) -> list[UnsafePath]:
        """An error for each symlink with a name of this form: `entries` leaves them out."""

    def refuse_link(self) -> None: ...

    def has_file(self) -> bool:
        """Whether a file is there."""

    def has_folder(self) -> bool: ...

    def read_small(self, what: str, largest: int) -> bytes:
        """A file that is read whole, if it is no larger."""

    def write(self, content: bytes) -> None:
        """The file appears whole or not at all, replaces an older one, and survives a crash."""

    def write_new(self, content: bytes) -> None:
        """A file that survives a crash after `settle`."""

    def make_vault(self, name: str, header: bytes) -> None:
        """A folder with a header that was not there; whole, or not at all."""

    def make_folder(self) -> None: ...

    def take_folder(self) -> None:
        """FileExistsError if it is there: no two processes take one."""

    def new_file(self) -> AbstractContextManager[int]:
        """A descriptor to write to. If the context ends well, the file is there for good."""

    def open_file(self, name: str) -> OpenFile:
        """MissingPart if it is not there."""

    def settle(self, unsynced: str) -> None:
        """A copy, with its file `unsynced` and the folders above, now survives a crash."""

    def remove(self, levels: int, first: str | None = None) -> None:
        """Removes a folder that lies so many levels below the vault's, if it is there.

        `first`: the file in it that goes before all others.
        """

    def held(self, *, alone: bool, wait: bool) -> AbstractContextManager[None]: ...

    def claim(self) -> AbstractContextManager[None]:
        """Says that this process works in the folder."""

    def claimed(self, *, superseded: bool) -> bool:
        """Whether a process may be working there; `superseded`: a later version is complete."""


class LocalPath(PosixPath):
    """A VaultPath in a directory: names that stay inside it, files that survive a crash, locks."""

    locks: Final = True

    @property
    def local(self) -> Self:
        return self

    def entries(self, form: re.Pattern[str]) -> list[VaultPath]:
        """A symlink in the place of a folder is refused: what is behind it is not the vault's."""
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
