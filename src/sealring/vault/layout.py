"""A vault's folders: objects, their versions, and copies of those."""

from __future__ import annotations

import re
from typing import Final

from sealring.errors import VaultError
from sealring.vault.objects import MANIFEST
from sealring.vault.storage import VaultPath, storage_of

OBJECT: Final = re.compile(r"[0-9a-f]{32}")
VERSION: Final = re.compile(r"[0-9]{10}")
COPY: Final = re.compile(r"[0-9a-f]{8}")


def entries(folder: VaultPath, form: re.Pattern[str]) -> list[VaultPath]:
    """Folders whose name is of this form; other names are not the vault's."""
    return storage_of(folder).entries(folder, form)


def is_complete(copy: VaultPath) -> bool:
    return storage_of(copy).exists(copy / MANIFEST)


def complete_copies(version: VaultPath) -> list[VaultPath]:
    return [one for one in entries(version, COPY) if is_complete(one)]


def complete(folder: VaultPath) -> list[VaultPath]:
    """The versions of an object that have a complete copy, or cannot be read."""
    return [one for one in entries(folder, VERSION) if _may_be_complete(one)]


def _may_be_complete(version: VaultPath) -> bool:
    try:
        return bool(complete_copies(version))
    except VaultError:
        return True  # to open it gives the error


def collected(
    folder: VaultPath, form: re.Pattern[str], problems: list[VaultError]
) -> list[VaultPath]:
    """Entries; what is wrong with the folder, and links in it, are put into `problems`."""
    try:
        found = entries(folder, form)
        problems += storage_of(folder).links(folder, form)
    except VaultError as problem:
        problems.append(problem)
        return []
    return found
