"""A vault: a directory of sealed objects, opened by a key file, a broker or a person's key."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from sealring.errors import (
    ConfigurationError,
    ForeignPart,
    KeysChanged,
    NoSuchObject,
    NotAVault,
    OutputExists,
    RolledBack,
    VaultError,
)
from sealring.vault import header as headers
from sealring.vault import objects
from sealring.vault.keys import Opener, Presented, SymmetricKey
from sealring.vault.layout import (
    COPY,
    OBJECT,
    VERSION,
    collected,
    complete,
    complete_copies,
    entries,
    is_complete,
)
from sealring.vault.ledger import Entry
from sealring.vault.ledgers import ledger_of
from sealring.vault.objects import Copy, Manifest
from sealring.vault.opened import HEADER, KeyChange, OpenedHeader, Tell, tell_later
from sealring.vault.sealed import AES, SUITES
from sealring.vault.storage import VaultPath, storage_of, vault_path

_LOG = logging.getLogger("sealring")
_LAST_VERSION: Final = 9_999_999_999
REMOVED: Final = "removed"
"""The kind of the version that says that an object was removed (removal.py)."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A complete version of an object, its manifest opened and authentic."""

    copy: Copy
    manifest: Manifest

    @property
    def whose(self) -> str:
        return f"{self.manifest.name!r} version {self.manifest.object_version}"


class Vault(OpenedHeader):
    """Use `Vault.create` or `Vault.open`. `close()` wipes its keys.

    A dataset that was opened from it has keys of its own and stays open.
    """

    @classmethod
    def create(
        cls, path: VaultPath | str, key: SymmetricKey, grant: str, suite: str = AES
    ) -> Vault:
        """A new vault that this key opens. It appears whole, or not at all."""
        path = vault_path(path)
        if suite not in SUITES:
            raise ConfigurationError(f"the suite {suite!r} is none of {', '.join(SUITES)}")
        storage = storage_of(path)
        if storage.exists(path) or storage.has_folder(path):
            raise OutputExists(f"{path} is there already: choose another place for the vault")
        header, ring = headers.new_header(suite)
        ledger_of(header.id, path)  # an error of the settings comes first
        owner = key.grant(grant, header.vault, header.key, ring.key)
        made = headers.with_grant(header, ring, owner)
        try:
            storage.make_vault(path, HEADER, headers.write_header(made))
        except OSError as problem:
            raise ConfigurationError(f"{path} cannot be made: {problem.strerror}") from problem
        return cls(path, key, made_now=True)

    @classmethod
    def open(cls, path: VaultPath | str, opener: Opener, expect: str | None = None) -> Vault:
        """`path`: its directory, or the URL of its folder in a store.

        `expect`: the id that the vault must have.
        """
        return cls(vault_path(path), opener, expect)

    # ---- keys ------------------------------------------------------------------------------------

    def revoke(
        self, name: str, also: Sequence[Presented] = (), tell: Tell = tell_later
    ) -> KeyChange:
        """Drops a grant and wraps everything under a new key, which that holder does not get."""
        with self.held(alone=True):
            self.refresh()
            self.require_writer()
            # One header for both: a holder that is dropped never shares the key with the rest.
            left = headers.without_grant(self.header, self.ring, name)
            change = self.begin_rotation(left, also, tell)
            return self._rewrap(change)

    def rekey(self, also: Sequence[Presented] = (), tell: Tell = tell_later) -> KeyChange:
        """Wraps every object's key under a new key of the vault."""
        with self.held(alone=True):
            self.refresh()
            self.require_writer()
            change = self.begin_rotation(self.header, also, tell)
            return self._rewrap(change)

    def _rewrap(self, change: KeyChange) -> KeyChange:
        count = 0
        problems: list[VaultError] = []
        for copy in self.copies(problems):
            try:
                if copy.complete or not storage_of(copy.folder).locks:
                    objects.write_key(copy.folder, self.ring, copy.place)
                    count += 1
                else:
                    _remove_unfinished(copy)
            except OSError as problem:
                problems.append(objects.not_written(copy.folder, problem))
        self.end_rotation(problems)
        return replace(change, versions=count)

    # ---- objects ---------------------------------------------------------------------------------

    def new_version(self, name: str, suite: str | None = None) -> Copy:
        """An empty copy of the next version. Its number is taken, so no two writers have one."""
        self.require_writer()
        folder = self.folder_of(name)
        entries(folder.parent, OBJECT)  # no symlinks
        storage = storage_of(folder)
        storage.make_folder(folder)
        entries(folder, VERSION)
        number = 1 + self._newest_number(folder)
        while True:
            if number > _LAST_VERSION:
                raise VaultError(f"{name!r} has {_LAST_VERSION} versions: seal it by another name")
            version = folder / f"{number:010}"
            try:
                storage.take_folder(version)
                break
            except FileExistsError:
                number += 1
        return objects.new_copy(version, self.ring, self.header.vault, suite or self.header.suite)

    def _newest_number(self, folder: VaultPath) -> int:
        """Of the versions that are genuine: an attacker can make directories with any number."""
        known = self.ledger.newest(folder.name)
        recorded = known.version if known else 0
        stored = self._newest_above(recorded, {int(one.name): one for one in complete(folder)})
        return stored.manifest.object_version if stored else recorded

    def commit(self, copy: Copy, kind: str, name: str, parts: list[objects.Part],
               content: str) -> str:  # fmt: skip
        """Makes the copy complete and records it. The manifest's digest."""
        self.require_open()
        manifest = copy.commit(kind, name, parts, content)
        if not storage_of(copy.folder).locks:
            # A change of keys may have missed what is complete only now.
            self.refresh()
            try:
                self.require_key(copy.vault_key, name)
            except KeysChanged:
                objects.remove(copy.folder)
                raise
        self.record(copy, manifest)
        return manifest

    def record(self, copy: Copy, manifest: str) -> None:
        self.ledger.record(self.header.key, self.header.generation, _entry(copy, manifest))

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
        found = {one.name for one in entries(self.path / "objects", OBJECT)}
        recorded = self.ledger.objects()
        stored = []
        for name in sorted(found | recorded):
            try:
                if name not in recorded and not complete(self.path / "objects" / name):
                    continue
                found_one = self._find(self.path / "objects" / name, f"object {name}")
                if found_one.manifest.kind != REMOVED:
                    stored.append(found_one)
            except VaultError as problem:
                if problems is None:
                    raise
                problems.append(problem)
        yield from sorted(stored, key=lambda one: one.manifest.name)

    def copies(self, problems: list[VaultError]) -> Iterator[Copy]:
        """All copies of all versions, complete or not.

        A complete one that does not open is put into `problems`. An incomplete one is reported: a
        save that was killed has left it, or an attacker has put it there.
        """
        for version in self._versions(problems):
            for one in collected(version, COPY, problems):
                whole = True
                try:
                    whole = is_complete(one)
                    copy = objects.open_copy(one, self.ring, self.header.vault)
                except VaultError as problem:
                    if whole:
                        problems.append(problem)
                    else:
                        _LOG.warning(
                            "sealring: %s is no complete copy and is left: %s", one, problem
                        )
                else:
                    yield copy

    def stored(self, problems: list[VaultError], name: str | None = None) -> Iterator[Stored]:
        """All complete versions of all objects, or of one.

        What is wrong with a version is put into `problems`.
        """
        versions = (
            self._versions(problems)
            if name is None
            else collected(self.folder_of(name), VERSION, problems)
        )
        for version in versions:
            try:
                stored = self._open_version(version) if complete_copies(version) else None
            except VaultError as problem:
                problems.append(problem)
            else:
                if stored is not None:
                    yield stored

    def _versions(self, problems: list[VaultError]) -> Iterator[VaultPath]:
        found = collected(self.path / "objects", OBJECT, problems)
        for name in sorted(self.ledger.objects() - {one.name for one in found}):
            _LOG.warning(
                "sealring: object %s, which %s has recorded, is not in %s: a copy of it that is "
                "put back later does not open under the new key",
                name, self.ledger.where, self.path,
            )  # fmt: skip
        for folder in found:
            yield from collected(folder, VERSION, problems)

    def remove_version(self, version: VaultPath) -> None:
        self.require_open()
        for copy in entries(version, COPY):
            objects.remove(copy)
        storage_of(version).remove(self.path, version)

    def incomplete(self, name: str) -> list[VaultPath]:
        """Versions of this name that were never finished."""
        folder = self.folder_of(name)
        whole = set(complete(folder))  # and what cannot be read
        return [one for one in entries(folder, VERSION) if one not in whole]

    def left_behind(self, name: str) -> list[VaultPath]:
        """Those of them that no process can be writing."""
        newest = max((one.name for one in complete(self.folder_of(name))), default="")
        return [
            one
            for one in self.incomplete(name)
            if not storage_of(one).claimed(one, superseded=one.name < newest)
        ]

    def before(self, name: str, version: int) -> list[VaultPath]:
        """The versions of this name that are whole, of those with a lower number; newest first."""
        found = []
        for one in reversed(complete(self.folder_of(name))):
            if int(one.name) < version:
                try:
                    stored = self._open_version(one)
                    for part in stored.manifest.parts:
                        with stored.copy.opened(part, stored.whose):
                            pass
                    found.append(one)
                except VaultError as problem:
                    _LOG.warning("sealring: %s is left as it is: %s", one, problem)
        return found

    def _find(self, folder: VaultPath, what: str, version: int | None = None) -> Stored:
        known = self.ledger.newest(folder.name)
        numbers = {int(one.name): one for one in complete(folder)}
        if version is not None:
            if version not in numbers:
                there = ", ".join(map(str, sorted(numbers))) or "none"
                raise NoSuchObject(
                    f"{what} has no version {version} in {self.path}: it has {there}"
                )
            return self._open_version(numbers[version])
        recorded = known.version if known else 0
        stored = self._newest_above(recorded, numbers)
        if stored is not None:
            self.record_quietly(self._seen, _entry(stored.copy, stored.manifest.digest))
            return stored
        if recorded and recorded not in numbers:
            older = max((one for one in numbers if one < recorded), default=0)
            raise RolledBack(
                f"{what} was last written as version {recorded}, says {self.ledger.where}, and "
                f"{self.path} has {f'version {older}' if older else 'none'}: an older copy of "
                "the vault lies there. Restore the newest, or ask for a version by its number"
            )
        if not numbers:
            raise NoSuchObject(f"{what} is not in {self.path}: `sealring vault ls` shows what is")
        return self._open_version(numbers[recorded or max(numbers)])

    def _newest_above(self, recorded: int, numbers: Mapping[int, VaultPath]) -> Stored | None:
        """The newest version that opens, of those that the ledger does not know yet.

        One that does not open may be an attacker's, so it hides no genuine one below it.
        """
        for number in sorted(numbers, reverse=True):
            if number > recorded:
                try:
                    return self._open_version(numbers[number])
                except VaultError as problem:
                    _LOG.warning("sealring: %s is left out: %s", numbers[number], problem)
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


def _remove_unfinished(copy: Copy) -> None:
    """A holder that was revoked may know its key: nothing more is sealed under that.

    One that a save still works in stays under the older key, with which that save fails.
    """
    storage = storage_of(copy.folder)
    if not any(storage.claimed(one, superseded=False) for one in (copy.folder, copy.folder.parent)):
        objects.remove(copy.folder)


def _entry(copy: Copy, manifest: str) -> Entry:
    return Entry(copy.place.object.hex(), copy.place.version, manifest)
