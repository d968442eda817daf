"""A vault in a store that fsspec reaches (s3://, http://, https://, memory://, file://).

A store has no rename and no lock. It must put a file whole or not at all, and show it at once. Then
the manifest, which is put last, is the commit, as on a disk. The content of a store is trusted as
little as that of a disk: see docs/vault.md.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import urlsplit

from sealring.errors import (
    ConfigurationError,
    MissingPart,
    NotAVault,
    SealringError,
    StoreFailed,
    UnsafePath,
    Unsupported,
)
from sealring.vault import requests
from sealring.vault.files import in_the_way
from sealring.vault.sealed import shown
from sealring.vault.storage import LocalPath, OpenFile, VaultPath

_BLOCK: Final = 8 << 20
_LONGEST_REASON: Final = 300
_ATTEMPTS: Final = 3
"""How often to try to read a small file that is replaced at the same time."""
_TAKEN: Final = "taken"
_ROOT: Final = PurePosixPath()
_LINK: Final = re.compile(rb"""href\s*=\s*["']([^"'<>\s]{1,1024})""", re.IGNORECASE)


def _lists_at_once(files: Any) -> bool:
    """Whether this kind of store can list all files below a folder by itself."""
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    if isinstance(files, AsyncFileSystem):
        return type(files)._find is not AsyncFileSystem._find
    return type(files).find is not AbstractFileSystem.find


def _reason(problem: Exception) -> str:
    """An error's reason in one short line. The text may come from the store, or an attacker."""
    told = str(problem).strip().splitlines() or [type(problem).__name__]
    return shown(told[0], _LONGEST_REASON)


def _refuse_credentials(url: str) -> None:
    """Raises ConfigurationError if the URL may hold credentials; the error does not show the URL.

    URLs are printed and kept in the ledger.
    """
    scheme = url.partition("://")[0]
    if scheme in requests.OF_THIS_MACHINE:
        return
    try:
        parts = urlsplit(url)
        plain = "@" not in parts.netloc and (scheme not in requests.HTTP or not parts.query)
        plain = plain and (parts.port is None or parts.port >= 0)
    except ValueError:  # the host or the port is malformed
        plain = False
    if not plain:
        raise ConfigurationError(
            f"the URL of the store ({scheme[:20]}://...) has a user name, a password, a query or a "
            "malformed address. It would be shown and recorded: leave credentials out, and give "
            "them to the store's client, in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for S3, in "
            """FSSPEC_HTTP='{"headers": {"Authorization": "..."}}' for HTTP"""
        )


class Store:
    """The folder of one vault in a store."""

    def __init__(self, url: str) -> None:
        _refuse_credentials(url)
        self.url = url.rstrip("/")
        self._process = -1
        self._reached: tuple[Any, str]
        self._connect()

    def _connect(self) -> tuple[Any, str]:
        """This process's own connection: a forked child cannot use its parent's."""
        if self._process != os.getpid():
            try:
                import fsspec
            except ImportError:
                raise ConfigurationError(
                    "stores need fsspec: pip install 'sealring[stores]'",
                    code="configuration.missing_extra",
                ) from None
            with self._asking():
                # No cache: files that others put meanwhile must be seen.
                self._reached = fsspec.core.url_to_fs(
                    self.url, use_listings_cache=False, **requests.options_of(self.url)
                )
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
            raise StoreFailed(f"{self.url} cannot be used: {_reason(problem)}") from problem

    def _do(self, size: int, method: str, *args: Any, **options: Any) -> Any:
        return requests.ask(self._files, self.url, size, method, *args, **options)

    def names(self, folder: str, form: re.Pattern[str]) -> list[str]:
        """The sorted names of this form in a folder."""
        with self._asking():
            self._files.invalidate_cache()
            try:
                found = self._list(folder)
            except (FileNotFoundError, NotADirectoryError):
                return []
        last = {str(one).rstrip("/").rpartition("/")[2] for one in found}
        return sorted(one for one in last if form.fullmatch(one))

    def _list(self, folder: str) -> list[str]:
        if requests.HTTP.isdisjoint(self._files.protocol):
            return self._do(0, "ls", self._at(folder), detail=False)  # type: ignore[no-any-return]
        # fsspec's own expression for links takes hours on some pages.
        page = bytes(self._do(0, "cat_file", self._at(folder) + "/"))
        return [one.decode(errors="replace") for one in _LINK.findall(page)]

    def below(self, folder: str) -> list[str] | None:
        """All files below an existing folder, as paths relative to it.

        None if the store has no listing of its own: fsspec's own `find` then asks for each folder,
        and leaves out folders that do not answer.
        """
        if not _lists_at_once(self._files):
            return None
        start = self._at(folder) + "/"
        with self._asking():
            self._files.invalidate_cache()
            try:
                found = self._do(requests.LARGEST_LISTING, "find", start.rstrip("/"))
            except (FileNotFoundError, NotADirectoryError):
                found = [""]
        if not all(str(one).startswith(start) for one in found):
            raise StoreFailed(f"{self.url} cannot be used: it lists no files in {folder}")
        return [str(one)[len(start) :] for one in found]

    def size(self, path: str) -> int | None:
        """A file's size; None if there is no file."""
        with self._asking():
            described = self._described(self._at(path))
            if described is None or described["type"] != "file":
                return None
            if described["size"] is None:
                raise StoreFailed(f"{self.url}/{path}: the store does not say how long it is")
            return int(described["size"])

    def _described(self, at: str) -> Any:
        """What the store says of a file or folder; None if neither is there.

        The clients' own `exists` would hide failures.
        """
        try:
            return self._do(0, "info", at)
        except FileNotFoundError:
            return None

    def read(self, path: str, largest: int) -> bytes | None:
        """Reads a whole file; None if it is larger. Raises FileNotFoundError if it is not there."""
        for _ in range(_ATTEMPTS):
            size = self.size(path)
            if size is None:
                raise FileNotFoundError(path)
            if size > largest:
                return None
            if size:
                # One byte more shows if a longer file was put there meanwhile.
                content = self.read_range(path, 0, size + 1)
            else:  # an empty file has no range to ask for
                with self._asking():
                    content = bytes(self._do(0, "cat_file", self._at(path)))
            if len(content) == size:
                return content
        # StoreFailed, as a cut answer says nothing about what the store holds.
        raise StoreFailed(f"{self.url}/{path} has other bytes than the store said")

    def read_range(self, path: str, start: int, end: int) -> bytes:
        """Reads the bytes from `start` to `end`; fewer if the file is shorter."""
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
        """Puts a file. `new`: raises FileExistsError if another file is there.

        A store without conditional puts may overwrite that file instead.
        """
        mode = "create" if new else "overwrite"
        try:
            self._in_folder(
                path,
                lambda: self._do(len(content), "pipe_file", self._at(path), content, mode=mode),
            )
        except (FileExistsError, StoreFailed) as problem:
            if isinstance(problem, StoreFailed) and not (
                new and requests.condition_failed(problem)
            ):
                raise
            # If an answer was lost, the client has repeated its put and may meet its own file.
            if self.size(path) != len(content) or self.read(path, len(content)) != content:
                raise FileExistsError(path) from problem

    def upload(self, source: int, path: str) -> None:
        """Uploads a whole open file in blocks. The store shows it once all of it is there."""

        def put() -> None:
            if requests.can_be_stopped(self._files):
                size = os.fstat(source).st_size
                here = f"/proc/self/fd/{source}"  # the file may have no name
                self._do(size, "put_file", here, self._at(path))
                return
            start = 0
            with self._files.open(self._at(path), "wb") as out:
                while block := os.pread(source, _BLOCK, start):
                    out.write(block)
                    start += len(block)

        self._in_folder(path, put)

    def _in_folder(self, path: str, put: Callable[[], None]) -> None:
        """Runs `put`, and makes missing folders. It makes no bucket: its name may be mistyped."""
        with self._asking():
            try:
                put()
            except FileNotFoundError:
                outermost = self._at("").split("/")[0] or "/"
                if self._described(outermost) is None:
                    raise StoreFailed(
                        f"{self.url} cannot be used: there is no {outermost}. Make it first"
                    ) from None
                self._do(0, "makedirs", self._at(path).rpartition("/")[0], exist_ok=True)
                try:
                    put()
                except FileNotFoundError as problem:
                    why = _reason(problem)
                    raise StoreFailed(f"{self.url}/{path} cannot be put: {why}") from problem

    def remove(self, path: str) -> None:
        with self._asking(), contextlib.suppress(FileNotFoundError):
            self._do(0, "rm", self._at(path), recursive=True)
            # S3 may refuse to remove single files, in an answer that s3fs takes for success.
            if self._described(self._at(path)) is not None:
                raise StoreFailed(
                    f"{self.url}/{path} is still there after it was removed: the store refuses to "
                    "remove it, or something was put there meanwhile. See what this user may do"
                )


@dataclass(frozen=True, slots=True)
class StorePath:
    """A VaultPath in a store."""

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
    def locks(self) -> bool:
        return False

    @property
    def local(self) -> Path:
        raise Unsupported(
            f"{self} lies in a store: do this in a directory, and copy the directory there"
        )

    def absolute(self) -> StorePath:
        return self

    def resolve(self) -> StorePath:
        return self

    def entries(self, form: re.Pattern[str]) -> list[VaultPath]:
        return [self / name for name in self.store.names(self.key, form)]

    def below(self) -> list[str] | None:
        return self.store.below(self.key)

    def links(self, form: re.Pattern[str]) -> list[UnsafePath]:
        return []

    def refuse_link(self) -> None:
        """A store has no links."""

    def has_file(self) -> bool:
        return self.store.size(self.key) is not None

    def has_folder(self) -> bool:
        return bool(self.store.names(self.key, re.compile(".+")))

    def read_small(self, what: str, largest: int) -> bytes:
        try:
            content = self.store.read(self.key, largest)
        except FileNotFoundError:
            raise NotAVault(f"{what} {self} cannot be read: No such file") from None
        if content is None:
            raise NotAVault(f"{what} {self} is larger than {largest} bytes")
        return content

    def write(self, content: bytes) -> None:
        self.store.put(self.key, content, new=False)

    def write_new(self, content: bytes) -> None:
        self.store.put(self.key, content, new=True)

    def make_vault(self, name: str, header: bytes) -> None:
        try:
            (self / name).write_new(header)
        except FileExistsError:  # another process has just made it
            raise in_the_way(self) from None

    def make_folder(self) -> None:
        """Does nothing: a store's folder exists when something is in it."""

    def take_folder(self) -> None:
        if self.has_folder():
            raise FileExistsError(str(self))
        # Random, so that a repeated put recognises its own file: see Store.put.
        (self / _TAKEN).write_new(secrets.token_hex(16).encode())

    @contextlib.contextmanager
    def new_file(self) -> Iterator[int]:
        """Gives a local file without a name, which is uploaded when the context ends."""
        with tempfile.TemporaryFile() as file:
            yield file.fileno()
            if self.has_file():
                raise FileExistsError(str(self))
            self.store.upload(file.fileno(), self.key)

    def open_file(self, name: str) -> OpenFile:
        missing = MissingPart(f"{name} is missing: restore {self} from a copy")

        def read(offset: int, size: int) -> bytes:
            try:
                return self.store.read_range(self.key, offset, offset + size)
            except FileNotFoundError:  # the file was removed since it was opened
                raise missing from None

        size = self.store.size(self.key)
        if size is None:
            raise missing
        return OpenFile(read, size)

    def settle(self, unsynced: str) -> None:
        """Does nothing: what was put into a store lasts."""

    def remove(self, levels: int, first: str | None = None) -> None:
        if first is not None:
            self.store.remove((self / first).key)
        self.store.remove(self.key)

    def held(self, *, alone: bool, wait: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def claim(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def claimed(self, *, superseded: bool) -> bool:
        """A store does not know who writes, so a version that is not superseded may be in use."""
        return not superseded


Where = VaultPath | str | os.PathLike[str]
"""A directory, or the URL of a folder in a store."""


def vault_path(given: Where) -> VaultPath:
    if isinstance(given, StorePath):
        return given
    named = str(given)
    return StorePath(Store(named)) if "://" in named else LocalPath(named)
