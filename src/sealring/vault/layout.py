"""A vault's folders: objects, their versions, and copies of those."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from sealring.errors import VaultError
from sealring.vault.objects import MANIFEST
from sealring.vault.storage import VaultPath

OBJECT: Final = re.compile(r"[0-9a-f]{32}")
VERSION: Final = re.compile(r"[0-9]{10}")
COPY: Final = re.compile(r"[0-9a-f]{8}")
_ONE_BY_ONE: Final = 4


def is_complete(copy: VaultPath) -> bool:
    return (copy / MANIFEST).has_file()


def complete_copies(version: VaultPath) -> list[VaultPath]:
    return [one for one in version.entries(COPY) if is_complete(one)]


def complete(versions: Iterable[VaultPath]) -> Iterator[VaultPath]:
    """Of versions of one object, in the order given: those that may be complete.

    Nothing is asked about versions behind the one that the caller stops at. A store is asked about
    the first versions one by one, each for a request or two; the files of all others come from
    one listing. Then the requests do not grow with the versions, but for the listing's pages.
    """
    at_once: set[str] | None = None
    for count, version in enumerate(versions):
        if count == _ONE_BY_ONE:
            at_once = _with_manifest(version.parent)
        if may_be_complete(version) if at_once is None else version.name in at_once:
            yield version


def _with_manifest(folder: VaultPath) -> set[str] | None:
    """The names of versions that have a complete copy; None where each is to be looked at."""
    files = folder.below()
    if files is None:
        return None
    ways = (one.split("/") for one in files)
    return {
        way[0] for way in ways if len(way) == 3 and COPY.fullmatch(way[1]) and way[2] == MANIFEST
    }


def may_be_complete(version: VaultPath) -> bool:
    """Whether it has a complete copy, or cannot be read."""
    try:
        return bool(complete_copies(version))
    except VaultError:
        return True  # to open it gives the error


def collected(
    folder: VaultPath, form: re.Pattern[str], problems: list[VaultError]
) -> list[VaultPath]:
    """Entries; what is wrong with the folder, and links in it, are put into `problems`."""
    try:
        found = folder.entries(form)
        problems += folder.links(form)
    except VaultError as problem:
        problems.append(problem)
        return []
    return found
