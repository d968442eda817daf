"""A vault's directories: objects, their versions, and copies of those.

The owner of the disk can put anything there. What cannot be read is a VaultError that names it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from sealring.errors import NotAVault, UnsafePath, VaultError
from sealring.vault.objects import MANIFEST

OBJECT: Final = re.compile(r"[0-9a-f]{32}")
VERSION: Final = re.compile(r"[0-9]{10}")
COPY: Final = re.compile(r"[0-9a-f]{8}")


def entries(folder: Path, form: re.Pattern[str]) -> list[Path]:
    """Directories whose name is of this form; other names are not the vault's.

    A symlink in their place is refused: what lies behind it is not the vault's.
    """
    try:
        if folder.is_symlink():
            raise _link(folder)
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


def links(folder: Path, form: re.Pattern[str]) -> list[UnsafePath]:
    """An error for each symlink with a name of this form: `entries` leaves them out."""
    with os.scandir(folder) as found:
        names = sorted(one.name for one in found if form.fullmatch(one.name) and one.is_symlink())
    return [
        UnsafePath(
            f"{folder / name} is a symlink: a vault has none. Put the directory itself there"
        )
        for name in names
    ]


def is_complete(copy: Path) -> bool:
    try:
        os.lstat(copy / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as problem:
        raise _unreadable(copy, problem) from problem
    return True


def complete_copies(version: Path) -> list[Path]:
    return [one for one in entries(version, COPY) if is_complete(one)]


def complete(folder: Path) -> list[Path]:
    """The versions of an object that have a complete copy, or cannot be read."""
    return [one for one in entries(folder, VERSION) if _may_be_complete(one)]


def _may_be_complete(version: Path) -> bool:
    try:
        return bool(complete_copies(version))
    except VaultError:
        return True  # to open it gives the error


def _link(path: Path) -> UnsafePath:
    return UnsafePath(f"{path} is a symlink: a vault has none. Put the directory itself there")


def _unreadable(path: Path, problem: OSError) -> NotAVault:
    return NotAVault(f"{path} cannot be read: {problem.strerror}")
