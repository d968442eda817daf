"""A vault: a directory of sealed objects, opened by a key file, a broker or a person's key."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from sealring.core.hooks import VaultEntry
from sealring.errors import (
    ConfigurationError,
    DiskFull,
    ForeignPart,
    NoSuchObject,
    NotAVault,
    RolledBack,
    SealringError,
    StoreFailed,
    VaultBusy,
    VaultError,
)
from sealring.formats.files import not_written, writing
from sealring.vault import header as headers
from sealring.vault import objects
from sealring.vault.files import in_the_way
from sealring.vault.keys import Opener, Presented, SymmetricKey
from sealring.vault.ledger import ledger_of
from sealring.vault.objects import (
    COPY_NAME,
    OBJECT_NAME,
    VERSION_NAME,
    Copy,
    Manifest,
    collected,
    complete,
    complete_copies,
    is_complete,
    may_be_complete,
)
from sealring.vault.opened import HEADER, KeyChange, OpenedHeader, Tell, tell_later
from sealring.vault.sealed import AES, SUITES, disk_failed
from sealring.vault.storage import VaultPath
from sealring.vault.stores import Where, vault_path

_LOG = logging.getLogger("sealring")
LAST_VERSION: Final = 9_999_999_999
_MOST_TAKEN: Final = 100
"""How many version numbers a writer tries that other writers have just taken."""
REMOVED: Final = "removed"
"""The kind of a version that marks its object as removed."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A complete version of an object, whose manifest is authentic."""

    copy: Copy
    manifest: Manifest

    @property
    def whose(self) -> str:
        return f"{self.manifest.name!r} version {self.manifest.object_version}"


class Vault(OpenedHeader):
    """An open vault, made by `Vault.create` or `Vault.open`. `close()` wipes its keys.

    A dataset that was opened from it has its own keys and stays open.
    """

    def __init__(
        self, path: VaultPath, opener: Opener, expect: str | None = None, *, made_now: bool = False
    ) -> None:
        self._known_complete: set[VaultPath] = set()
        super().__init__(path, opener, expect, made_now=made_now)

    @classmethod
    def create(
        cls,
        path: Where,
        key: SymmetricKey,
        grant: str,
        suite: str = AES,
    ) -> Vault:
        """Makes a new vault that this key opens. It appears whole or not at all."""
        path = vault_path(path)
        if suite not in SUITES:
            raise ConfigurationError(f"the suite {suite!r} is none of {', '.join(SUITES)}")
        if path.has_file() or path.has_folder():
            raise in_the_way(path)
        header, ring = headers.new_header(suite)
        ledger_of(header.id, path)  # raises an error in the settings before anything is written
        owner = key.grant(grant, header.vault, header.key, ring.key)
        made = headers.with_grant(header, ring, owner)
        with writing(path, "made"):
            path.make_vault(HEADER, headers.write_header(made))
        return cls(path, key, made_now=True)

    @classmethod
    def open(cls, path: Where, opener: Opener, expect: str | None = None) -> Vault:
        """Opens a vault. `path`: its directory, or the URL of its folder in a store.

        `expect`: the id that the vault must have.
        """
        return cls(vault_path(path), opener, expect)

    # ---- keys ------------------------------------------------------------------------------------

    def revoke(
        self, name: str, also: Sequence[Presented] = (), tell: Tell = tell_later
    ) -> KeyChange:
        """Drops a grant, and wraps all objects' keys under a new key that its holder cannot get."""
        return self.rekey(also, tell, without=name)

    def rekey(
        self,
        also: Sequence[Presented] = (),
        tell: Tell = tell_later,
        *,
        without: str | None = None,
    ) -> KeyChange:
        """Wraps every object's key under a new key of the vault."""
        with self.held(alone=True):
            self.refresh()
            self.require_writer()
            left = self.header
            if without is not None:
                # One header drops the grant and has the new key, so the holder never gets that key.
                left = headers.without_grant(left, self.ring, without)
            change = self.begin_rotation(left, also, tell)
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

    # ---- versions --------------------------------------------------------------------------------

    def find(self, name: str, version: int | None = None) -> Stored:
        """Finds the newest version, or the given one.

        Raises RolledBack if the newest is older than the ledger's.
        """
        stored = self._find(self.folder_of(name), repr(name), version)
        if stored.manifest.kind == REMOVED:
            raise NoSuchObject(f"{name!r} was removed from {self.path}")
        return stored

    def folder_of(self, name: str) -> VaultPath:
        object_bytes = objects.object_id(self.ring, objects.check_name(name))
        return self.path / "objects" / object_bytes.hex()

    def newest(self, problems: list[VaultError] | None = None) -> Iterator[Stored]:
        """The newest version of every object, in the order of their names.

        An object that only the ledger knows is a problem. A problem is raised, or added to
        `problems` if that is given.
        """
        found = {one.name for one in (self.path / "objects").entries(OBJECT_NAME)}
        recorded = self.ledger.entries()
        stored = []
        for name in sorted(found | recorded.keys()):
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

    def incomplete(self, name: str, *, abandoned: bool = False) -> list[VaultPath]:
        """The versions of this name that were never finished.

        `abandoned`: only those that no process can be writing.
        """
        found = self.folder_of(name).entries(VERSION_NAME)
        whole = set(self._complete(found))  # includes versions that cannot be read
        newest = max((one.name for one in whole), default="")
        return [
            one
            for one in found
            if one not in whole
            # Asks again, as a listing may leave a version out, and the caller removes these.
            and not may_be_complete(one)
            and not (abandoned and one.claimed(superseded=one.name < newest))
        ]

    def _complete(self, versions: Sequence[VaultPath]) -> list[VaultPath]:
        """Those of an object's versions that may be complete. The versions are given in order.

        A store is not asked again about versions that this process has found complete.
        """
        unknown = [one for one in reversed(versions) if one not in self._known_complete]
        found = set(complete(unknown))
        whole = [one for one in versions if one in found or one in self._known_complete]
        if versions and not versions[0].locks:
            self._known_complete |= found
        return whole

    def surplus(self, name: str, version: int, keep: int) -> list[VaultPath]:
        """The complete versions of this name below a number, except for the newest `keep`."""
        lower = [
            one for one in self.folder_of(name).entries(VERSION_NAME) if int(one.name) < version
        ]
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
        known = self.ledger.entries().get(folder.name)
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
        """The newest version that may be complete, even if it does not open."""
        versions = (self.path / "objects" / object_name).entries(VERSION_NAME)
        return next(complete(reversed(versions)), None)

    def _newest_above(self, recorded: int, versions: Mapping[int, VaultPath]) -> Stored | None:
        """The newest version above `recorded`, the ledger's, that opens; None if there is none.

        A version that does not open is skipped: an attacker may have put it there to hide an older,
        genuine one.
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
        """Opens the version's copy under the newest key, which must be as the ledger records."""
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
                except VaultError as problem:  # another copy may be the right one
                    failure = failure or problem
        assert failure is not None
        raise failure

    def _as_recorded(self, version: VaultPath, copy: Copy) -> Stored:
        stored = Stored(copy, copy.manifest())
        if objects.object_id(self.ring, stored.manifest.name) != copy.place.object:
            raise ForeignPart(f"{version} has the manifest of another object, {stored.whose}")
        found = copy.place.version, stored.manifest.digest
        known = self.ledger.entries().get(version.parent.name)
        if known is not None and known.version == found[0] and known.manifest != found[1]:
            raise RolledBack(
                f"{stored.whose} has another content than {self.ledger.where} has recorded: "
                "another copy was put in its place, a holder of the vault's key has changed it, or "
                "the ledger is another copy's"
            )
        return stored

    # ---- objects ---------------------------------------------------------------------------------

    def new_version(self, name: str, suite: str | None = None) -> Copy:
        """Makes an empty copy of the next version. No other writer can take the same number."""
        self.require_writer()
        folder = self.folder_of(name)
        folder.parent.refuse_link()
        folder.make_folder()
        versions = numbered(folder)
        number = 1 + self._newest_number(folder, versions)
        for _ in range(_MOST_TAKEN):
            while number in versions:  # left by killed saves
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
        """The number of the newest genuine version; an attacker can make folders of any number."""
        known = self.ledger.entries().get(folder.name)
        recorded = known.version if known else 0
        stored = self._newest_above(recorded, versions)
        return stored.manifest.object_version if stored else recorded

    def commit(self, copy: Copy, kind: str, name: str, parts: list[objects.Part],
               content: str) -> str:  # fmt: skip
        """Makes the copy complete and records it in the ledger. Returns the manifest's digest."""
        self.require_open()
        manifest = copy.commit(kind, name, parts, content)
        if not copy.folder.locks:
            if not copy.complete:  # before older versions are removed in its favour
                raise StoreFailed(
                    f"{copy.folder} has no manifest, and the store said that it was put: save again"
                )
            # A change of keys may have missed this copy, as it became complete only now.
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

        The error of a complete copy that does not open is added to `problems`. For an incomplete
        one there is only a warning: a killed save has left it, or an attacker has put it there.
        """
        for version in self._versions(problems):
            for one in collected(version, COPY_NAME, problems):
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
        """All complete versions of all objects, or of one object.

        The error of a version that does not open is added to `problems`.
        """
        versions = (
            self._versions(problems)
            if name is None
            else collected(self.folder_of(name), VERSION_NAME, problems)
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
        found = collected(self.path / "objects", OBJECT_NAME, problems)
        if not self.path.locks:
            problems += self._left_out({one.name for one in found})
        for name in sorted(self.ledger.entries().keys() - {one.name for one in found}):
            _LOG.warning(
                "sealring: object %s, which %s has recorded, is not in %s: a copy of it that is "
                "put back later does not open under the new key",
                name, self.ledger.where, self.path,
            )  # fmt: skip
        for folder in found:
            yield from collected(folder, VERSION_NAME, problems)

    def _left_out(self, listed: set[str]) -> Iterator[VaultError]:
        """Errors for versions that the ledger knows and the store did not list.

        A single wrong answer of the store can leave a version out. Its key must not be dropped: the
        version would never open again.
        """
        for name, known in sorted(self.ledger.entries().items()):
            folder = self.path / "objects" / name
            version = folder / f"{known.version:010}"
            if (
                name in listed
                and version in folder.entries(VERSION_NAME)
                and may_be_complete(version)
            ):
                continue
            try:
                newer = self._find(folder, f"object {name}")
            except VaultError as problem:
                yield problem
            else:
                if name not in listed or newer.manifest.object_version == known.version:
                    yield RolledBack(f"{newer.whose} is in {self.path}, which did not list it")

    def remove(self, name: str, version: int | None = None) -> int:
        """Removes an object, or one version that is not the newest.

        Returns how many versions were removed. A ledger only goes forward: if an object that it
        knows were just gone, that would look like a rollback. So a last version, recorded like any
        other, marks the object as removed. If somebody puts the object back later, this is seen.
        """
        self.require_writer()
        with self.held(alone=True):
            self.refresh()
            if version is not None:
                found = [self._removable(name, version)]
            else:
                found = self.folder_of(name).entries(VERSION_NAME)  # also those that do not open
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
        if wanted not in wanted.parent.entries(VERSION_NAME):
            raise NoSuchObject(f"{name!r} has no version {version} in {self.path}")
        return wanted

    def _commit_removal(self, name: str, *, known: bool) -> None:
        if not known and self.folder_of(name).name not in self.ledger.entries():
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
        for copy in version.entries(COPY_NAME):
            objects.remove(copy)
        version.remove(3)


def numbered(folder: VaultPath) -> dict[int, VaultPath]:
    """The versions of an object by their numbers, complete or not."""
    return {int(one.name): one for one in folder.entries(VERSION_NAME)}


def entry_of(copy: Copy, manifest: str) -> VaultEntry:
    return VaultEntry(copy.place.object.hex(), copy.place.version, manifest)


def _remove_unfinished(copy: Copy) -> None:
    """Removes an unfinished copy: a revoked holder may know its key, so nothing may use it.

    A copy that a save is still writing stays under the older key, so that this save fails.
    """
    if not any(one.claimed(superseded=False) for one in (copy.folder, copy.folder.parent)):
        objects.remove(copy.folder)
