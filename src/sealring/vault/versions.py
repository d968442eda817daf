"""Which versions of objects a vault holds, and which of them is the newest.

Nothing is asked about versions that do not matter: a name may have thousands, and in a store each
question is a request.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sealring.core.hooks import VaultEntry
from sealring.errors import ForeignPart, NoSuchObject, NotAVault, RolledBack, VaultError
from sealring.vault import objects
from sealring.vault.keys import Opener
from sealring.vault.layout import (
    OBJECT,
    VERSION,
    complete,
    complete_copies,
    may_be_complete,
)
from sealring.vault.objects import Copy, Manifest
from sealring.vault.opened import OpenedHeader
from sealring.vault.sealed import disk_failed
from sealring.vault.storage import VaultPath

_LOG = logging.getLogger("sealring")
REMOVED: Final = "removed"
"""The kind of the version that says that an object was removed."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A complete version of an object, its manifest opened and authentic."""

    copy: Copy
    manifest: Manifest

    @property
    def whose(self) -> str:
        return f"{self.manifest.name!r} version {self.manifest.object_version}"


class Versions(OpenedHeader):
    """The part of a vault that finds versions."""

    def __init__(
        self, path: VaultPath, opener: Opener, expect: str | None = None, *, made_now: bool = False
    ) -> None:
        self._known_complete: set[VaultPath] = set()
        super().__init__(path, opener, expect, made_now=made_now)

    def find(self, name: str, version: int | None = None) -> Stored:
        """The newest version, which must not be older than the ledger's; or the one asked for."""
        stored = self._find(self.folder_of(name), repr(name), version)
        if stored.manifest.kind == REMOVED:
            raise NoSuchObject(f"{name!r} was removed from {self.path}")
        return stored

    def folder_of(self, name: str) -> VaultPath:
        object_bytes = objects.object_id(self.ring, objects.check_name(name))
        return self.path / "objects" / object_bytes.hex()

    def newest(self, problems: list[VaultError] | None = None) -> Iterator[Stored]:
        """Of every object, in the order of their names; also those that only the ledger knows.

        What is wrong with an object is raised, or put into `problems`.
        """
        found = {one.name for one in (self.path / "objects").entries(OBJECT)}
        recorded = self.ledger.objects()
        stored = []
        for name in sorted(found | recorded):
            try:
                if name not in recorded and self._newest_complete(name) is None:
                    continue
                found_one = self._find(self.path / "objects" / name, f"object {name}")
                if found_one.manifest.kind != REMOVED:
                    stored.append(found_one)
            except VaultError as problem:
                if problems is None:
                    raise
                problems.append(problem)
        yield from sorted(stored, key=lambda one: one.manifest.name)

    def incomplete(self, name: str) -> list[VaultPath]:
        """Versions of this name that were never finished."""
        found = self.folder_of(name).entries(VERSION)
        whole = set(self._complete(found))  # and what cannot be read
        return [one for one in found if one not in whole and not may_be_complete(one)]

    def left_behind(self, name: str) -> list[VaultPath]:
        """Those of them that no process can be writing."""
        found = self.folder_of(name).entries(VERSION)
        whole = set(self._complete(found))
        newest = max((one.name for one in whole), default="")
        return [
            one
            for one in found
            if one not in whole
            # A listing may have left it out, and what is left behind is removed.
            and not may_be_complete(one)
            and not one.claimed(superseded=one.name < newest)
        ]

    def _complete(self, versions: Sequence[VaultPath]) -> list[VaultPath]:
        """Of these versions of one object, which are in order, those that may be complete.

        A store is not asked again about what was complete when this process asked before.
        """
        unknown = [one for one in reversed(versions) if one not in self._known_complete]
        found = set(complete(unknown))
        whole = [one for one in versions if one in found or one in self._known_complete]
        if versions and not versions[0].locks:
            self._known_complete |= found
        return whole

    def surplus(self, name: str, version: int, keep: int) -> list[VaultPath]:
        """The versions of this name below a number that are whole, but for the newest `keep`."""
        lower = [one for one in self.folder_of(name).entries(VERSION) if int(one.name) < version]
        if len(lower) <= keep:
            return []
        found = []
        for one in complete(reversed(lower)):
            try:
                stored = self._open_version(one)
                for part in stored.manifest.parts:
                    with stored.copy.opened(part, stored.whose):
                        pass
                found.append(one)
            except VaultError as problem:
                _LOG.warning("sealring: %s is left as it is: %s", one, problem)
        return found[keep:]

    def _find(self, folder: VaultPath, what: str, version: int | None = None) -> Stored:
        known = self.ledger.newest(folder.name)
        versions = numbered(folder)
        if version is not None:
            if version not in versions or not may_be_complete(versions[version]):
                whole = complete(versions[one] for one in sorted(versions))
                there = ", ".join(str(int(one.name)) for one in whole) or "none"
                raise NoSuchObject(
                    f"{what} has no version {version} in {self.path}: it has {there}"
                )
            return self._open_version(versions[version])
        recorded = known.version if known else 0
        stored = self._newest_above(recorded, versions)
        if stored is not None:
            self.record_quietly(self._seen, entry_of(stored.copy, stored.manifest.digest))
            return stored
        if recorded and (recorded not in versions or not may_be_complete(versions[recorded])):
            lower = sorted((one for one in versions if one < recorded), reverse=True)
            older = next(complete(versions[one] for one in lower), None)
            raise RolledBack(
                f"{what} was last written as version {recorded}, says {self.ledger.where}, and "
                f"{self.path} has {f'version {int(older.name)}' if older else 'none'}: an older "
                "copy of the vault lies there. Restore the newest, or ask for a version by its "
                "number"
            )
        newest = versions[recorded] if recorded else self._newest_complete(folder.name)
        if newest is None:
            raise NoSuchObject(f"{what} is not in {self.path}: `sealring vault ls` shows what is")
        return self._open_version(newest)

    def _newest_complete(self, object_name: str) -> VaultPath | None:
        """Whether it opens or not."""
        versions = (self.path / "objects" / object_name).entries(VERSION)
        return next(complete(reversed(versions)), None)

    def _newest_above(self, recorded: int, versions: Mapping[int, VaultPath]) -> Stored | None:
        """The newest version that opens, of those that the ledger does not know yet.

        One that does not open may be an attacker's, so it hides no genuine one below it.
        """
        above = sorted((one for one in versions if one > recorded), reverse=True)
        for version in complete(versions[one] for one in above):
            try:
                return self._open_version(version)
            except VaultError as problem:
                if disk_failed(problem):
                    raise
                _LOG.warning("sealring: %s is left out: %s", version, problem)
        return None

    def _open_version(self, version: VaultPath) -> Stored:
        """The copy under the newest key of the vault. It is the recorded one, if one is."""
        opened: list[Copy] = []
        failure: VaultError | None = None
        for folder in complete_copies(version):
            try:
                opened.append(objects.open_copy(folder, self.ring, self.header.vault))
            except VaultError as problem:
                failure = problem
        if not opened:
            raise failure or NotAVault(f"{version} holds no complete copy")
        failure = None
        newest = max(one.vault_key for one in opened)
        for copy in opened:
            if copy.vault_key == newest:
                try:
                    return self._as_recorded(version, copy)
                except VaultError as problem:  # it does not hide the right one beside it
                    failure = failure or problem
        assert failure is not None
        raise failure

    def _as_recorded(self, version: VaultPath, copy: Copy) -> Stored:
        stored = Stored(copy, copy.manifest())
        if objects.object_id(self.ring, stored.manifest.name) != copy.place.object:
            raise ForeignPart(f"{version} has the manifest of another object, {stored.whose}")
        found = copy.place.version, stored.manifest.digest
        known = self.ledger.newest(version.parent.name)
        if known is not None and known.version == found[0] and known.manifest != found[1]:
            raise RolledBack(
                f"{stored.whose} has another content than {self.ledger.where} has recorded: "
                "another copy was put in its place, a holder of the vault's key has changed it, or "
                "the ledger is another copy's"
            )
        return stored


def numbered(folder: VaultPath) -> dict[int, VaultPath]:
    """The versions of an object, complete or not."""
    return {int(one.name): one for one in folder.entries(VERSION)}


def entry_of(copy: Copy, manifest: str) -> VaultEntry:
    return VaultEntry(copy.place.object.hex(), copy.place.version, manifest)
