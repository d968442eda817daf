"""Versions of objects in a store that fsspec reaches (s3://, memory://, file:// and others).

A store has no rename and no lock, so the manifest is the commit: it is put last, and only where
there is none. All that is put is sealed already and means nothing elsewhere: the context of each
file has the vault, the object, the version and the part. What is fetched is believed as little as a
disk is: the manifest must open first, and names and sizes of all other files come from it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from sealring import _native
from sealring.errors import (
    ConfigurationError,
    MissingExtra,
    NoSuchObject,
    SealringError,
    StoreFailed,
    VaultError,
)
from sealring.vault import objects
from sealring.vault.files import NEW_FILE, locked, remove_directory, write_new
from sealring.vault.layout import COPY, VERSION
from sealring.vault.objects import KEY_FILE, MANIFEST
from sealring.vault.sealed import LARGEST_MANIFEST
from sealring.vault.trees import verify
from sealring.vault.vault import Stored, Vault

_LOG = logging.getLogger("sealring")
_BLOCK: Final = 8 << 20
_LARGEST_KEY: Final = 1 << 16
PULLING: Final = "pull.lock"
Progress = Callable[[int], None]


class Store:
    """The folder of one vault in a store."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError:
            raise MissingExtra("stores need fsspec: pip install 'sealring[stores]'") from None
        self.url = url.rstrip("/")
        with self._asking():
            self._files: Any
            self._files, self._root = fsspec.core.url_to_fs(self.url)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except (SealringError, FileExistsError, FileNotFoundError):
            raise
        except Exception as problem:  # each store has exceptions of its own
            reason = str(problem).strip() or type(problem).__name__
            raise StoreFailed(f"{self.url} cannot be used: {reason.splitlines()[0]}") from problem

    def names(self, folder: str, form: re.Pattern[str]) -> list[str]:
        """What lies there under names of this form, in their order."""
        with self._asking():
            self._files.invalidate_cache()
            try:
                found = self._files.ls(f"{self._root}/{folder}", detail=False)
            except FileNotFoundError:
                return []
        last = {str(one).rstrip("/").rpartition("/")[2] for one in found}
        return sorted(one for one in last if form.fullmatch(one))

    def size(self, path: str) -> int | None:
        with self._asking():
            try:
                return int(self._files.size(f"{self._root}/{path}"))
            except FileNotFoundError:
                return None

    def read(self, path: str, largest: int) -> bytes:
        with self._asking():
            size = self.size(path)
            if size is None:
                raise FileNotFoundError(path)
            if size > largest:
                raise StoreFailed(f"{self.url}/{path} has {size} bytes, more than it can have")
            content = bytes(self._files.cat_file(f"{self._root}/{path}", start=0, end=size))
            if len(content) != size:
                raise StoreFailed(f"{self.url}/{path} has other bytes than the store said")
            return content

    def put(self, path: str, content: bytes, *, new: bool) -> None:
        """Whole or not at all where the store has conditional puts. `new`: FileExistsError."""
        with self._asking():
            self._files.makedirs(f"{self._root}/{path}".rpartition("/")[0], exist_ok=True)
            mode = "create" if new else "overwrite"
            self._files.pipe_file(f"{self._root}/{path}", content, mode=mode)

    def upload(self, source: Path, path: str, progress: Progress) -> None:
        with self._asking():
            self._files.makedirs(f"{self._root}/{path}".rpartition("/")[0], exist_ok=True)
            with source.open("rb") as file, self._files.open(f"{self._root}/{path}", "wb") as out:
                while block := file.read(_BLOCK):
                    out.write(block)
                    progress(len(block))

    def download(self, path: str, size: int, target: Path, progress: Progress) -> None:
        """So many bytes, no more, to a new file that is then on the disk."""
        with open(os.open(target, NEW_FILE, 0o600), "wb") as out:
            for start in range(0, size, _BLOCK):
                end = min(start + _BLOCK, size)
                with self._asking():
                    block = self._files.cat_file(f"{self._root}/{path}", start=start, end=end)
                if len(block) != end - start:
                    raise StoreFailed(f"{self.url}/{path} was cut: put it there again")
                out.write(block)
                progress(len(block))
            out.flush()
            os.fsync(out.fileno())

    def remove(self, path: str) -> None:
        with self._asking(), contextlib.suppress(FileNotFoundError):
            self._files.rm(f"{self._root}/{path}", recursive=True)


def push(vault: Vault, name: str, url: str, version: int | None, progress: Progress) -> int:
    """Puts a version, else the newest, into a store; its number. What is there is not put again."""
    store = Store(url)
    with vault.reading():
        stored = vault.find(name, version)
        copy = stored.copy
        folder = copy.folder.relative_to(vault.path).as_posix()
        for part in stored.manifest.parts:
            if store.size(f"{folder}/{part.name}") != _native.sealed_length(part.length):
                store.upload(copy.folder / part.name, f"{folder}/{part.name}", progress)
        # The key's file changes with the vault's key; the manifest does not.
        store.put(f"{folder}/{KEY_FILE}", (copy.folder / KEY_FILE).read_bytes(), new=False)
        manifest = (copy.folder / MANIFEST).read_bytes()
        try:
            store.put(f"{folder}/{MANIFEST}", manifest, new=True)
        except FileExistsError:
            if store.read(f"{folder}/{MANIFEST}", LARGEST_MANIFEST) != manifest:
                # A put that was cut, in a store without conditional puts.
                store.put(f"{folder}/{MANIFEST}", manifest, new=False)
        above = folder.rpartition("/")[0]
        for other in store.names(above, COPY):
            if other != copy.folder.name:  # under keys that the vault has no more
                store.remove(f"{above}/{other}/{MANIFEST}")
                store.remove(f"{above}/{other}")
    return stored.manifest.object_version


def pull(vault: Vault, name: str, url: str, version: int | None, progress: Progress) -> int:
    """Fetches a version, else the newest that opens, into the vault; its number."""
    store = Store(url)
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
                    except (VaultError, FileNotFoundError) as problem:
                        if isinstance(problem, StoreFailed):
                            raise
                        _LOG.warning("sealring: %s/%s is left out: %s", url, copy, problem)
                    else:
                        # The ledger decides whether it is old.
                        return vault.find(name, version).manifest.object_version
    raise NoSuchObject(f"{url} has no version of {name!r} that this vault's key opens")


def _fetch(vault: Vault, store: Store, target: Path, progress: Progress) -> None:
    where = target.relative_to(vault.path).as_posix()
    if (target / MANIFEST).exists():
        return
    key = store.read(f"{where}/{KEY_FILE}", _LARGEST_KEY)
    sealed = store.read(f"{where}/{MANIFEST}", LARGEST_MANIFEST)
    remove_directory(vault.path, target)  # what a fetch that was killed has left
    target.mkdir(mode=0o700, parents=True)
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
            raise ConfigurationError(f"{target} cannot be written: {problem.strerror}") from None
        raise
