"""A vault: a directory of sealed objects, opened by a key file, a broker or a person's key."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from sealring.errors import (
    ConfigurationError,
    DiskFull,
    NoSuchObject,
    RolledBack,
    SealringError,
    StoreFailed,
    VaultBusy,
    VaultError,
)
from sealring.formats.files import not_written, writing
from sealring.vault import header as headers
from sealring.vault import objects
from sealring.vault.keys import Opener, Presented, SymmetricKey
from sealring.vault.layout import (
    COPY,
    OBJECT,
    VERSION,
    collected,
    complete_copies,
    is_complete,
    may_be_complete,
)
from sealring.vault.ledgers import ledger_of
from sealring.vault.objects import Copy
from sealring.vault.opened import HEADER, KeyChange, Tell, tell_later
from sealring.vault.sealed import AES, SUITES
from sealring.vault.storage import VaultPath
from sealring.vault.stores import Where, vault_path
from sealring.vault.versions import REMOVED, Stored, Versions, entry_of, numbered

_LOG = logging.getLogger("sealring")
LAST_VERSION: Final = 9_999_999_999
_MOST_TAKEN: Final = 100
"""Numbers that other writers take after they were listed."""


class Vault(Versions):
    """Use `Vault.create` or `Vault.open`. `close()` wipes its keys.

    A dataset that was opened from it has keys of its own and stays open.
    """

    @classmethod
    def create(
        cls,
        path: Where,
        key: SymmetricKey,
        grant: str,
        suite: str = AES,
    ) -> Vault:
        """A new vault that this key opens. It appears whole, or not at all."""
        path = vault_path(path)
        if suite not in SUITES:
            raise ConfigurationError(f"the suite {suite!r} is none of {', '.join(SUITES)}")
        if path.has_file() or path.has_folder():
            raise VaultError(
                f"{path} is there already: choose another place for the vault",
                code="vault.output_exists",
            )
        header, ring = headers.new_header(suite)
        ledger_of(header.id, path)  # an error of the settings comes first
        owner = key.grant(grant, header.vault, header.key, ring.key)
        made = headers.with_grant(header, ring, owner)
        with writing(path, "made"):
            path.make_vault(HEADER, headers.write_header(made))
        return cls(path, key, made_now=True)

    @classmethod
    def open(cls, path: Where, opener: Opener, expect: str | None = None) -> Vault:
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
        unwritten: list[SealringError] = []
        for copy in self.copies(problems):
            try:
                if copy.complete or not copy.folder.locks:
                    objects.write_key(copy.folder, self.ring, copy.place)
                    count += 1
                else:
                    _remove_unfinished(copy)
            except DiskFull as problem:
                unwritten.append(problem)
            except OSError as problem:
                unwritten.append(not_written(copy.folder, problem))
        self.end_rotation([*problems, *unwritten])
        return replace(change, versions=count)

    # ---- objects ---------------------------------------------------------------------------------

    def new_version(self, name: str, suite: str | None = None) -> Copy:
        """An empty copy of the next version. Its number is taken, so no two writers have one."""
        self.require_writer()
        folder = self.folder_of(name)
        folder.parent.refuse_link()
        folder.make_folder()
        versions = numbered(folder)
        number = 1 + self._newest_number(folder, versions)
        for _ in range(_MOST_TAKEN):
            while number in versions:  # what killed saves have left
                number += 1
            if number > LAST_VERSION:
                raise VaultError(f"{name!r} has {LAST_VERSION} versions: seal it by another name")
            version = folder / f"{number:010}"
            try:
                version.take_folder()
                break
            except FileExistsError:
                number += 1
        else:
            raise VaultError(
                f"{name!r} gets no number: {folder} refuses {_MOST_TAKEN} up to {number - 1} as "
                "taken, and lists no versions there. Remove what lies there, or mend the store"
            )
        return objects.new_copy(version, self.ring, self.header.vault, suite or self.header.suite)

    def _newest_number(self, folder: VaultPath, versions: Mapping[int, VaultPath]) -> int:
        """Of the versions that are genuine: an attacker can make directories with any number."""
        known = self.ledger.newest(folder.name)
        recorded = known.version if known else 0
        stored = self._newest_above(recorded, versions)
        return stored.manifest.object_version if stored else recorded

    def commit(self, copy: Copy, kind: str, name: str, parts: list[objects.Part],
               content: str) -> str:  # fmt: skip
        """Makes the copy complete and records it. The manifest's digest."""
        self.require_open()
        manifest = copy.commit(kind, name, parts, content)
        if not copy.folder.locks:
            if not copy.complete:  # before older versions are removed in its favour
                raise StoreFailed(
                    f"{copy.folder} has no manifest, and the store said that it was put: save again"
                )
            # A change of keys may have missed what is complete only now.
            self.refresh()
            try:
                self.require_key(copy.vault_key, name)
            except VaultBusy:
                objects.remove(copy.folder)
                raise
        self.record(copy, manifest)
        return manifest

    def record(self, copy: Copy, manifest: str) -> None:
        self.ledger.record(self.header.key, self.header.generation, entry_of(copy, manifest))

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
        if not self.path.locks:
            problems += self._left_out({one.name for one in found})
        for name in sorted(self.ledger.objects() - {one.name for one in found}):
            _LOG.warning(
                "sealring: object %s, which %s has recorded, is not in %s: a copy of it that is "
                "put back later does not open under the new key",
                name, self.ledger.where, self.path,
            )  # fmt: skip
        for folder in found:
            yield from collected(folder, VERSION, problems)

    def _left_out(self, listed: set[str]) -> Iterator[VaultError]:
        """What the ledger knows, and a store does not list: a single wrong answer can do that.

        The keys of what is not listed now must not be dropped: it would never open again.
        """
        for name in sorted(self.ledger.objects()):
            folder, known = self.path / "objects" / name, self.ledger.newest(name)
            assert known is not None
            version = folder / f"{known.version:010}"
            if name in listed and version in folder.entries(VERSION) and may_be_complete(version):
                continue
            try:
                newer = self._find(folder, f"object {name}")
            except VaultError as problem:
                yield problem
            else:
                if name not in listed or newer.manifest.object_version == known.version:
                    yield RolledBack(f"{newer.whose} is in {self.path}, which did not list it")

    def remove(self, name: str, version: int | None = None) -> int:
        """Removes an object, or one version that is not the newest; how many versions were removed.

        A ledger only goes forward, so an object that it knows cannot just be gone: that would be a
        rollback. A last version says that the object was removed, and is recorded like any other.
        Who puts the object back later is then seen as well.
        """
        self.require_writer()
        with self.held(alone=True):
            self.refresh()
            if version is not None:
                found = [self._removable(name, version)]
            else:
                found = self.folder_of(name).entries(VERSION)  # also those that do not open
                self._commit_removal(name, known=bool(found))
            for one in found:
                self.remove_version(one)
        return len(found)

    def _removable(self, name: str, version: int) -> VaultPath:
        newest = self.find(name).manifest.object_version
        if version == newest:
            raise ConfigurationError(
                f"version {version} is the newest of {name!r}: without it the vault would look "
                "older than it is. Remove the object, or seal a new version first"
            )
        wanted = self.folder_of(name) / f"{version:010}"
        if wanted not in wanted.parent.entries(VERSION):
            raise NoSuchObject(f"{name!r} has no version {version} in {self.path}")
        return wanted

    def _commit_removal(self, name: str, *, known: bool) -> None:
        if not known and self.ledger.newest(self.folder_of(name).name) is None:
            raise NoSuchObject(f"{name!r} is not in {self.path}: `sealring vault ls` shows what is")
        copy = self.new_version(name)
        try:
            self.commit(copy, REMOVED, name, [], "{}")
        except BaseException:
            if not copy.complete:
                objects.remove(copy.folder)
            raise

    def remove_version(self, version: VaultPath) -> None:
        self.require_open()
        for copy in version.entries(COPY):
            objects.remove(copy)
        version.remove(3)


def _remove_unfinished(copy: Copy) -> None:
    """A holder that was revoked may know its key: nothing more is sealed under that.

    One that a save still works in stays under the older key, with which that save fails.
    """
    if not any(one.claimed(superseded=False) for one in (copy.folder, copy.folder.parent)):
        objects.remove(copy.folder)
