"""Versions of objects in a store that fsspec reaches (see stores.py).

A store has no rename and no lock, so the manifest is the commit: it is put last, and only where
there is none. All that is put is sealed already and means nothing elsewhere: the context of each
file has the vault, the object, the version and the part. What is fetched is believed as little as a
disk is: the manifest must open first, and names and sizes of all other files come from it.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Final

from sealring import _native
from sealring.errors import (
    ForeignVault,
    NoSuchObject,
    NotAVault,
    RolledBack,
    SealringError,
    UnsafePath,
    VaultError,
)
from sealring.formats.files import not_written
from sealring.vault import objects
from sealring.vault.files import locked, make_folders, remove_directory, write_new
from sealring.vault.header import Header, read_header, write_header
from sealring.vault.layout import COPY, VERSION
from sealring.vault.objects import KEY_FILE, MANIFEST, Copy, Part
from sealring.vault.opened import HEADER
from sealring.vault.sealed import LARGEST_DOCUMENT, LARGEST_MANIFEST, read_small
from sealring.vault.stores import Progress, Store
from sealring.vault.trees import verify
from sealring.vault.vault import Vault
from sealring.vault.versions import Stored

_LOG = logging.getLogger("sealring")
_LARGEST_KEY: Final = 1 << 16
PULLING: Final = "pull.lock"


def push(vault: Vault, name: str, url: str, version: int | None, progress: Progress) -> int:
    """Puts a version, else the newest, into a store; its number. What is there is not put again."""
    store = Store(url)
    vault.require_directory()
    with vault.reading():
        stored = vault.find(name, version)
        copy = stored.copy
        folder = copy.folder.relative_to(vault.path).as_posix()
        for part in stored.manifest.parts:
            if store.size(f"{folder}/{part.name}") != _native.sealed_length(part.length):
                _upload(store, copy, part, stored.whose, f"{folder}/{part.name}", progress)
        # The key's file changes with the vault's key; the manifest does not.
        key = read_small(copy.folder / KEY_FILE, "the object's key", _LARGEST_KEY)
        store.put(f"{folder}/{KEY_FILE}", key, new=False)
        manifest = read_small(copy.folder / MANIFEST, "the manifest", LARGEST_MANIFEST)
        try:
            store.put(f"{folder}/{MANIFEST}", manifest, new=True)
        except FileExistsError:
            there = None
            with suppress(FileNotFoundError):  # it was removed since
                there = store.read_unless_larger(f"{folder}/{MANIFEST}", LARGEST_MANIFEST)
            if there != manifest:
                # A put that was cut, in a store without conditional puts.
                store.put(f"{folder}/{MANIFEST}", manifest, new=False)
        _put_header(vault, store)
        above = folder.rpartition("/")[0]
        for other in store.names(above, COPY):
            if other != copy.folder.name:  # under keys that the vault has no more
                store.remove(f"{above}/{other}/{MANIFEST}")
                store.remove(f"{above}/{other}")
    return stored.manifest.object_version


def _upload(
    store: Store, copy: Copy, part: Part, whose: str, path: str, progress: Progress
) -> None:
    """The file that the manifest lists, and no other: what lies in its place may be a link."""
    name = f"part {part.name} of {whose}"
    file = objects.open_part(copy.folder / part.name, name, part.length, part.commitment)
    try:
        assert isinstance(file.source, int), "require_directory"
        store.upload(file.source, path, progress)
    finally:
        file.close()


def _put_header(vault: Vault, store: Store) -> None:
    """With it, workers open the vault in the store itself."""
    try:
        there = read_header(store.read(HEADER, LARGEST_DOCUMENT), f"{store.url}/{HEADER}")
    except (FileNotFoundError, NotAVault):
        there = None
    own = vault.header
    if there is not None and there.id == own.id and _state(there) > _state(own):
        raise RolledBack(
            f"{store.url} has header number {there.generation} with key {there.key}, and "
            f"{vault.path} number {own.generation} with key {own.key}: an older copy of the vault "
            "lies there. Push from the newest"
        )
    if there is not None and there.id != own.id:
        raise ForeignVault(f"{store.url} holds the vault {there.id}: choose another place")
    if there != own:
        store.put(HEADER, write_header(own), new=False)


def _state(header: Header) -> tuple[int, int]:
    return header.key, header.generation


def pull(vault: Vault, name: str, url: str, version: int | None, progress: Progress) -> int:
    """Fetches a version, else the newest that opens, into the vault; its number."""
    store = Store(url)
    vault.require_directory()
    vault.require_writer()
    # One at a time: what another one has fetched so far would look like a killed one's remains.
    with vault.held(alone=False), locked(vault.path / PULLING, shared=False):
        vault.refresh()
        folder = vault.folder_of(name)
        above = folder.relative_to(vault.path).as_posix()
        for number in sorted(map(int, store.names(above, VERSION)), reverse=True):
            if version in (None, number):
                for copy in store.names(f"{above}/{number:010}", COPY):
                    target = folder / f"{number:010}" / copy
                    try:
                        _fetch(vault, store, target, progress)
                    except _Local as problem:  # it is not the store's fault, nor the version's
                        raise problem.reason from None
                    except (VaultError, FileNotFoundError) as problem:
                        _LOG.warning("sealring: %s/%s is left out: %s", url, copy, problem)
                    else:
                        # The ledger decides whether it is old.
                        return vault.find(name, version).manifest.object_version
    raise NoSuchObject(f"{url} has no version of {name!r} that this vault's key opens")


class _Local(Exception):
    """What is wrong with the vault's own directory, so that no version can be fetched."""

    def __init__(self, reason: SealringError) -> None:
        self.reason = reason


def _read_small(store: Store, path: str, largest: int) -> bytes:
    """What is larger is no file of the vault's, so it hides no version below it."""
    content = store.read_unless_larger(path, largest)
    if content is None:
        raise NotAVault(f"{store.url}/{path} is larger than {largest} bytes")
    return content


def _fetch(vault: Vault, store: Store, target: Path, progress: Progress) -> None:
    where = target.relative_to(vault.path).as_posix()
    if (target / MANIFEST).exists():
        return
    key = _read_small(store, f"{where}/{KEY_FILE}", _LARGEST_KEY)
    sealed = _read_small(store, f"{where}/{MANIFEST}", LARGEST_MANIFEST)
    try:
        remove_directory(vault.path, target)  # what a fetch that was killed has left
        make_folders(target.parent)
        target.mkdir(mode=0o700)
    except UnsafePath as problem:
        raise _Local(problem) from None
    except OSError as problem:
        raise _Local(not_written(target, problem)) from None
    try:
        write_new(target / KEY_FILE, key)
        copy = objects.open_copy(target, vault.ring, vault.header.vault)
        manifest = copy.opened_manifest(sealed, f"{store.url}/{where}/{MANIFEST}")
        for part in manifest.parts:
            size = _native.sealed_length(part.length)
            store.download(f"{where}/{part.name}", size, target / part.name, progress)
        verify(Stored(copy, manifest), lambda _: None)
        copy.complete_with(sealed)
    except BaseException as problem:
        remove_directory(vault.path, target)
        if isinstance(problem, OSError) and not isinstance(problem, FileNotFoundError):
            raise not_written(target, problem) from None
        raise
