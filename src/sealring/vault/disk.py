"""A vault in a directory: names that stay inside it, files that survive a crash, and locks.

The owner of the disk can put anything there. What cannot be read is a VaultError that names it.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

from sealring.errors import MissingPart, NotAVault, UnsafePath
from sealring.formats.files import NEW_FILE
from sealring.vault import files
from sealring.vault.sealed import raise_own_lack, read_small


class DiskFile:
    """A file that is open for reading."""

    def __init__(self, descriptor: int) -> None:
        self.source = descriptor
        self.size = os.fstat(descriptor).st_size

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self.source, size, offset)

    def close(self) -> None:
        if self.source >= 0:
            os.close(self.source)
            self.source = -1


class Disk:
    """See `storage.Storage`."""

    locks: Final = True

    def entries(self, folder: Path, form: re.Pattern[str]) -> list[Path]:
        """A symlink in the place of a folder is refused: what is behind it is not the vault's."""
        try:
            self.refuse_link(folder)
            with os.scandir(folder) as found:
                names = [
                    one.name
                    for one in found
                    if form.fullmatch(one.name) and one.is_dir(follow_symlinks=False)
                ]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as problem:
            raise _unreadable(folder, problem) from problem
        return [folder / name for name in sorted(names)]

    def below(self, folder: Path) -> None:
        return None

    def links(self, folder: Path, form: re.Pattern[str]) -> list[UnsafePath]:
        if not folder.is_dir():
            return []
        with os.scandir(folder) as found:
            names = sorted(
                one.name for one in found if form.fullmatch(one.name) and one.is_symlink()
            )
        return [_link(folder / name) for name in names]

    def refuse_link(self, path: Path) -> None:
        if path.is_symlink():
            raise _link(path)

    def exists(self, path: Path) -> bool:
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as problem:
            raise _unreadable(path.parent, problem) from problem
        return True

    def has_folder(self, path: Path) -> bool:
        return path.is_dir()

    def read_small(self, path: Path, what: str, largest: int) -> bytes:
        return read_small(path, what, largest)

    def write(self, path: Path, content: bytes) -> None:
        files.write_file(path, content)

    def write_new(self, path: Path, content: bytes) -> None:
        files.write_new(path, content)

    def make_vault(self, path: Path, name: str, header: bytes) -> None:
        temporary = files.beside(path)
        try:
            temporary.mkdir(mode=0o700)
            (temporary / "objects").mkdir(mode=0o700)
            files.write_file(temporary / name, header)
            files.move_into_place(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def make_folder(self, folder: Path) -> None:
        try:
            with files.named(folder):
                folder.mkdir(mode=0o700, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise UnsafePath(
                f"{folder} cannot be made: something that is no directory lies there, or in the "
                "place of one above it. Remove it"
            ) from None

    def take_folder(self, folder: Path) -> None:
        with files.named(folder):
            folder.mkdir(mode=0o700)

    @contextmanager
    def new_file(self, path: Path) -> Iterator[int]:
        with files.named(path):
            file = os.open(path, NEW_FILE, 0o600)
            try:
                yield file
                os.fsync(file)
            finally:
                os.close(file)

    def open_file(self, path: Path, name: str) -> DiskFile:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            raise MissingPart(f"{name} is missing: restore {path} from a copy") from None
        except OSError as problem:
            raise_own_lack(problem)
            raise UnsafePath(f"{name} cannot be read: {path}: {problem.strerror}") from None
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise UnsafePath(f"{name} cannot be read: {path} is not a regular file")
        return DiskFile(file)

    def settle(self, folder: Path, unsynced: str) -> None:
        with files.named(folder):
            files.sync_together([folder / unsynced, folder, *folder.parents[:3]])

    def remove(self, root: Path, folder: Path, first: str | None = None) -> None:
        files.remove_directory(root, folder, first)

    def held(self, path: Path, *, alone: bool, wait: bool) -> AbstractContextManager[None]:
        return files.locked(path / "lock", shared=not alone, wait=wait)

    def claim(self, folder: Path) -> AbstractContextManager[None]:
        return files.claim(folder)

    def claimed(self, folder: Path, *, superseded: bool) -> bool:
        return files.claimed(folder)


def _link(path: Path) -> UnsafePath:
    return UnsafePath(f"{path} is a symlink: a vault has none. Put the directory itself there")


def _unreadable(path: Path, problem: OSError) -> NotAVault:
    raise_own_lack(problem)
    return NotAVault(f"{path} cannot be read: {problem.strerror}")
