"""A vault in a store that fsspec reaches (s3://, memory://, file:// and others).

A store has no rename and no lock. It must put a file whole or not at all, and show at once what was
put; the manifest, put last, is then the commit as on a disk. What a store holds is believed as
little as what a disk holds: see docs/vault.md.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

from sealring.errors import (
    MissingExtra,
    MissingPart,
    NotAVault,
    SealringError,
    StoreFailed,
    UnsafePath,
)
from sealring.vault import requests
from sealring.vault.files import NEW_FILE

_BLOCK: Final = 8 << 20
_LARGEST_LISTING: Final = 64 << 20
"""Bytes, of the answers that list an object's files: for about 200,000 of them."""
_TAKEN: Final = "taken"
_ROOT: Final = PurePosixPath()
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class StorePath:
    """A file or a folder of a vault in a store."""

    store: Store = field(repr=False)
    inside: PurePosixPath = _ROOT

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(self.store, self.inside / name)

    def __str__(self) -> str:
        return f"{self.store.url}/{self.key}".rstrip("/")

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is no path of this machine")

    @property
    def key(self) -> str:
        return "" if self.inside == _ROOT else str(self.inside)

    @property
    def name(self) -> str:
        return self.inside.name

    @property
    def parent(self) -> StorePath:
        return StorePath(self.store, self.inside.parent)

    @property
    def parents(self) -> Sequence[StorePath]:
        return [StorePath(self.store, one) for one in self.inside.parents]

    def relative_to(self, other: StorePath) -> PurePosixPath:
        return self.inside.relative_to(other.inside)

    def absolute(self) -> StorePath:
        return self

    def resolve(self) -> StorePath:
        return self


class StoreFile:
    """A file of a store, of which ranges are read."""

    def __init__(self, store: Store, key: str, size: int) -> None:
        self._store, self._key, self.size = store, key, size
        self.source = self.read

    def read(self, offset: int, size: int) -> bytes:
        return self._store.read_range(self._key, offset, offset + size)

    def close(self) -> None:
        """A range is a request of its own: nothing is open between two of them."""


class Store:
    """The folder of one vault in a store."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._process = -1
        self._reached: tuple[Any, str]
        self._connect()

    def _connect(self) -> tuple[Any, str]:
        """A connection of this process's own: none of them can be used by a forked child."""
        if self._process != os.getpid():
            try:
                import fsspec
            except ImportError:
                raise MissingExtra("stores need fsspec: pip install 'sealring[stores]'") from None
            with self._asking():
                # What others have put meanwhile must be seen.
                self._reached = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
            self._process = os.getpid()
        return self._reached

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.url, self._process = state["url"], -1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Store) and other.url == self.url

    def __hash__(self) -> int:
        return hash(self.url)

    @property
    def _files(self) -> Any:
        return self._connect()[0]

    def _at(self, path: str) -> str:
        return f"{self._connect()[1]}/{path}"

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except (SealringError, FileExistsError, FileNotFoundError):
            raise
        except Exception as problem:  # each store has exceptions of its own
            reason = str(problem).strip() or type(problem).__name__
            raise StoreFailed(f"{self.url} cannot be used: {reason.splitlines()[0]}") from problem

    def _do(self, size: int, method: str, *args: Any, **options: Any) -> Any:
        return requests.ask(self._files, self.url, size, method, *args, **options)

    def names(self, folder: str, form: re.Pattern[str]) -> list[str]:
        """What lies there under names of this form, in their order."""
        with self._asking():
            self._files.invalidate_cache()
            try:
                found = self._do(0, "ls", self._at(folder), detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        last = {str(one).rstrip("/").rpartition("/")[2] for one in found}
        return sorted(one for one in last if form.fullmatch(one))

    def below(self, folder: str) -> list[str]:
        """All files below a folder, as paths from it."""
        start = self._at(folder) + "/"
        with self._asking():
            self._files.invalidate_cache()
            try:
                found = self._do(_LARGEST_LISTING, "find", start.rstrip("/"))
            except (FileNotFoundError, NotADirectoryError):
                return []
        return [str(one)[len(start) :] for one in found if str(one).startswith(start)]

    def size(self, path: str) -> int | None:
        with self._asking():
            try:
                described = self._do(0, "info", self._at(path))
            except FileNotFoundError:
                return None
            return int(described["size"]) if described["type"] == "file" else None

    def read(self, path: str, largest: int) -> bytes:
        with self._asking():
            size = self.size(path)
            if size is None:
                raise FileNotFoundError(path)
            if size > largest:
                raise StoreFailed(f"{self.url}/{path} has {size} bytes, more than it can have")
            content = self.read_range(path, 0, size)
            if len(content) != size:
                raise StoreFailed(f"{self.url}/{path} has other bytes than the store said")
            return content

    def read_range(self, path: str, start: int, end: int) -> bytes:
        """At most so many bytes; fewer if the file was cut."""
        if start == end:
            return b""
        with self._asking():
            came = bytes(self._do(end - start, "cat_file", self._at(path), start=start, end=end))
        if len(came) > end - start:
            raise StoreFailed(
                f"{self.url}/{path}: {end - start} bytes from {start} on were asked for, and "
                f"{len(came)} came. The store, or a proxy before it, does not serve ranges"
            )
        return came

    def put(self, path: str, content: bytes, *, new: bool) -> None:
        """`new`: FileExistsError if there is another, where the store has conditional puts."""
        mode = "create" if new else "overwrite"
        try:
            self._in_folder(
                path,
                lambda: self._do(len(content), "pipe_file", self._at(path), content, mode=mode),
            )
        except FileExistsError:
            # If the answer to the put was lost, the client has repeated it.
            if self.size(path) != len(content) or self.read(path, len(content)) != content:
                raise

    def upload(self, source: int, path: str, progress: Progress) -> None:
        """All of an open file, in blocks. The store shows it when all of it is there."""

        def put() -> None:
            if requests.can_be_stopped(self._files):
                size = os.fstat(source).st_size
                here = f"/proc/self/fd/{source}"  # it may have no name
                told = requests.telling(progress)
                self._do(size, "put_file", here, self._at(path), callback=told)
                return
            start = 0
            with self._files.open(self._at(path), "wb") as out:
                while block := os.pread(source, _BLOCK, start):
                    out.write(block)
                    start += len(block)
                    progress(len(block))

        self._in_folder(path, put)

    def _in_folder(self, path: str, put: Callable[[], None]) -> None:
        """Where a store has folders, they are made. A bucket is not: its name may be mistyped."""
        with self._asking():
            try:
                put()
            except FileNotFoundError:
                outermost = self._at("").split("/")[0] or "/"
                if not self._files.exists(outermost):
                    raise StoreFailed(
                        f"{self.url} cannot be used: there is no {outermost}. Make it first"
                    ) from None
                self._files.makedirs(self._at(path).rpartition("/")[0], exist_ok=True)
                put()

    def download(self, path: str, size: int, target: Path, progress: Progress) -> None:
        """So many bytes, no more, to a new file that is then on the disk."""
        with open(os.open(target, NEW_FILE, 0o600), "wb") as out:
            for start in range(0, size, _BLOCK):
                end = min(start + _BLOCK, size)
                block = self.read_range(path, start, end)
                if len(block) != end - start:
                    raise StoreFailed(f"{self.url}/{path} was cut: put it there again")
                out.write(block)
                progress(len(block))
            out.flush()
            os.fsync(out.fileno())

    def remove(self, path: str) -> None:
        with self._asking(), contextlib.suppress(FileNotFoundError):
            self._do(0, "rm", self._at(path), recursive=True)


class InStore:
    """See `storage.Storage`."""

    locks: Final = False

    def entries(self, folder: StorePath, form: re.Pattern[str]) -> list[StorePath]:
        return [folder / name for name in folder.store.names(folder.key, form)]

    def below(self, folder: StorePath) -> list[str]:
        return folder.store.below(folder.key)

    def links(self, folder: StorePath, form: re.Pattern[str]) -> list[UnsafePath]:
        return []

    def refuse_link(self, path: StorePath) -> None:
        """A store has none."""

    def exists(self, path: StorePath) -> bool:
        return path.store.size(path.key) is not None

    def has_folder(self, path: StorePath) -> bool:
        return bool(path.store.names(path.key, re.compile(".+")))

    def read_small(self, path: StorePath, what: str, largest: int) -> bytes:
        size = path.store.size(path.key)
        if size is None:
            raise NotAVault(f"{what} {path} cannot be read: No such file")
        if size > largest:
            raise NotAVault(f"{what} {path} is larger than {largest} bytes")
        return path.store.read_range(path.key, 0, size)

    def write(self, path: StorePath, content: bytes) -> None:
        path.store.put(path.key, content, new=False)

    def write_new(self, path: StorePath, content: bytes) -> None:
        path.store.put(path.key, content, new=True)

    def make_vault(self, path: StorePath, name: str, header: bytes) -> None:
        self.write_new(path / name, header)

    def make_folder(self, folder: StorePath) -> None:
        """A folder is there when something is in it."""

    def take_folder(self, folder: StorePath) -> None:
        if self.has_folder(folder):
            raise FileExistsError(str(folder))
        # Random, so that a repeated put knows its own: see Store.put.
        self.write_new(folder / _TAKEN, secrets.token_hex(16).encode())

    @contextmanager
    def new_file(self, path: StorePath) -> Iterator[int]:
        """What is sealed goes to a file without a name, and then to the store."""
        with tempfile.TemporaryFile() as file:
            yield file.fileno()
            if self.exists(path):
                raise FileExistsError(str(path))
            path.store.upload(file.fileno(), path.key, lambda count: None)

    def open_file(self, path: StorePath, name: str) -> StoreFile:
        size = path.store.size(path.key)
        if size is None:
            raise MissingPart(f"{name} is missing: restore {path} from a copy")
        return StoreFile(path.store, path.key, size)

    def settle(self, folder: StorePath, unsynced: str) -> None:
        """What was put is there."""

    def remove(self, root: StorePath, folder: StorePath, first: str | None = None) -> None:
        if first is not None:
            folder.store.remove((folder / first).key)
        folder.store.remove(folder.key)

    def held(self, path: StorePath, *, alone: bool, wait: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def claim(self, folder: StorePath) -> AbstractContextManager[None]:
        return nullcontext()

    def claimed(self, folder: StorePath, *, superseded: bool) -> bool:
        """A store does not know who writes: what no later version follows may be in use."""
        return not superseded
