"""Files that are written whole and durably or not at all, and read with a limit.

`write_whole` is the one function through which a file of the project appears under its name.
`not_written` names every failed write: a full disk is `DiskFull`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from sealring.errors import ConfigurationError, DiskFull, LogError, NotALog, SealringError

MAX_FILE_BYTES: Final = 1 << 20
"""The limit for keys, certificates, policies and the like."""
LEFT_BEHIND: Final = frozenset({".lock", ".new"})
"""Names that a writer may leave in a folder although it has written nothing there."""
NEW_FILE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_LONGEST_NAME: Final = 255
"""The most bytes of a name on Linux's file systems."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_POLL_SECONDS: Final = 0.05
_MORE_BYTES: Final = 65536
"""The bytes that are read at a time from a file that has grown since it was opened."""


# ---- errors


def is_full(problem: OSError) -> bool:
    """Whether a file system or a quota has no space left."""
    return problem.errno in _FULL


def not_written(what: object, problem: OSError, done: str = "written") -> ConfigurationError:
    """The error for a file that cannot be written, or for a directory that cannot be "made"."""
    text = f"{what} cannot be {done}: "
    if is_full(problem):
        why = os.strerror(problem.errno or 0)  # the native core adds what it wrote
        return DiskFull(
            f"{text}{why}. Free some space there or choose another disk, and run it again"
        )
    return ConfigurationError(f"{text}{problem.strerror}")


@contextlib.contextmanager
def writing(what: object, done: str = "written") -> Iterator[None]:
    """Turns the system's errors into those of `not_written`."""
    try:
        yield
    except OSError as problem:
        raise not_written(what, problem, done) from problem


# ---- reading


def read_public(path: Path, what: str, error: Callable[[str], ConfigurationError]) -> bytes:
    """The content of a file of at most MAX_FILE_BYTES, or `error`."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as problem:
        raise error(f"{what} {path} cannot be read: {problem.strerror}") from problem
    check_size(len(content), path, what, error)
    return content


def check_size(
    size: int, path: Path, what: str, error: Callable[[str], ConfigurationError]
) -> None:
    if size > MAX_FILE_BYTES:
        raise error(f"{what} {path} is larger than {MAX_FILE_BYTES} bytes, so it is something else")


def read_limited(
    path: Path | str, limit: int, error: type[SealringError] = NotALog, *, links: bool = True
) -> bytes | None:
    """Reads a regular file of at most `limit` bytes. None if there is none; else `error`.

    Without `links`, a symbolic link is refused too.
    """
    # O_NONBLOCK: a FIFO that an attacker placed there must not hang the reader.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, flags if links else flags | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as problem:
        if not links and problem.errno == errno.ELOOP:
            raise error(f"{path} is a link: there is no such file here") from None
        raise error(f"{path} cannot be read: {problem.strerror}") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise error(f"{path} is not a regular file")
        content = os.read(fd, min(status.st_size, limit) + 1)
        while len(content) <= limit and (more := os.read(fd, _MORE_BYTES)):
            content += more
    except OSError as problem:  # a disk or a network file system failed
        raise error(f"{path} cannot be read: {problem.strerror}") from None
    finally:
        os.close(fd)
    if len(content) > limit:
        raise error(f"{path} is larger than {limit} bytes, so it is something else")
    return content


def read_there(path: Path | str, limit: int, error: type[SealringError] = NotALog) -> bytes:
    """Like `read_limited`, but the file must be there."""
    content = read_limited(path, limit, error)
    if content is None:
        raise ConfigurationError(f"there is no file {path}")
    return content


# ---- writing


def write_whole(
    path: Path,
    content: bytes | bytearray,
    mode: int | None = None,
    *,
    waiting: Path | None = None,
    replace: bool = True,
    lasting: bool = True,
) -> None:
    """Makes `path` appear with all of its content, or raises OSError and leaves what was there.

    Until then the content is in a file with a random name, in the same folder or in `waiting`, a
    folder of the same file system. Without a `mode` it is 0644, limited by the umask. An existing
    file is replaced; without `replace` it is FileExistsError. If `lasting`, the new file is there
    even after a power cut. Otherwise the older one may be, until the caller syncs the folder.
    """
    random = secrets.token_hex(8)
    temporary = (
        waiting / random if waiting else path.with_name(name_beside(path.name, f".{random}"))
    )
    try:
        fd = os.open(temporary, NEW_FILE, 0o644 if mode is None else 0o600)
        # Unbuffered, because a copy of a secret would stay in the buffer.
        with open(fd, "wb", buffering=0) as file, memoryview(content) as left:
            if mode is not None:
                os.fchmod(fd, mode)
            done = 0
            while done < len(left):
                done += file.write(left[done:])
            os.fsync(fd)
        if replace:
            os.replace(temporary, path)
        else:
            os.link(temporary, path)  # unlike rename(), it fails if the name is taken
    finally:
        # On a full disk each attempt would otherwise leave a file behind.
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    if lasting:
        sync_directory(path.parent)


def name_beside(name: str, ending: str) -> str:
    """A hidden name that begins like `name`, and is no longer than a file's name may be."""
    room = _LONGEST_NAME - len(".") - len(ending)
    return f".{os.fsencode(name)[:room].decode(errors='ignore')}{ending}"


def sync_directory(path: Path) -> None:
    """Makes the names in a folder durable: after a power loss, new and renamed files are there."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_private(path: Path, content: bytes | bytearray) -> None:
    """Writes a new file of mode 0600. An existing file is not replaced."""
    try:
        write_whole(path, content, 0o600, replace=False)
    except FileExistsError:
        raise ConfigurationError(
            f"{path} is there already and will not be overwritten: move it away first"
        ) from None
    except OSError as problem:
        raise not_written(path, problem) from problem


def write_public(path: Path, content: bytes) -> None:
    """Writes a file of mode 0644, and replaces an older one."""
    _replace(path, content, 0o644)


def replace_private(path: Path, content: bytes) -> None:
    """Writes a file of mode 0600, and replaces an older one."""
    _replace(path, content, 0o600)


def _replace(path: Path, content: bytes, mode: int) -> None:
    with contextlib.suppress(OSError):
        if not stat.S_ISREG((found := path.stat()).st_mode) and not stat.S_ISDIR(found.st_mode):
            # A rename would replace /dev/stdout itself by a file, for every program.
            raise ConfigurationError(f"{path} is not a regular file, and is not replaced")
    with writing(path):
        write_whole(path, content, mode)


class DurableFiles:
    """Files below `root` that must be on the disk before something else is written.

    `sync` makes their names durable. Unfinished files are in `root`/.new, so that a reader can tell
    them apart, and the next writer removes what a killed one left.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._waiting = root / ".new"
        self._changed: set[Path] = set()

    def clear(self) -> None:
        """Removes what a killed writer left behind."""
        shutil.rmtree(self._waiting, ignore_errors=True)

    def write(self, name: str, content: bytes, *, replace: bool = True) -> None:
        path = self._root / name
        self._make(path.parent)
        waiting = self.new_name().parent
        write_whole(path, content, waiting=waiting, replace=replace, lasting=False)
        self._changed.add(path.parent)

    def new_name(self) -> Path:
        """A name for an unfinished file, in a folder that all processes of a run share."""
        # Another user may have put a file or a link in the folder's place.
        with contextlib.suppress(OSError):
            if not stat.S_ISDIR(os.lstat(self._waiting).st_mode):
                os.unlink(self._waiting)
        self._make(self._waiting)
        return self._waiting / secrets.token_hex(8)

    def write_new(self, name: str, content: bytes) -> bool:
        """Writes and syncs a file that another process may also write. The first one stays.

        Returns False if there was one already.
        """
        try:
            self.write(name, content, replace=False)
        except FileExistsError:
            return False
        self.sync()
        return True

    def sync(self) -> None:
        for folder in sorted(self._changed, reverse=True):  # inner folders before outer ones
            sync_directory(folder)
        self._changed.clear()

    def _make(self, folder: Path) -> None:
        if folder.is_dir():
            return
        self._make(folder.parent)
        folder.mkdir(exist_ok=True)
        self._changed.add(folder.parent)


@contextlib.contextmanager
def locked(folder: Path, seconds: float = 0.0) -> Iterator[None]:
    """Holds the folder's lock, waiting up to `seconds` for it. It ends with the process."""
    until = time.monotonic() + seconds
    try:
        fd = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as problem:
        raise NotALog(f"{folder} cannot be locked: {problem.strerror}") from None
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise LogError(
                        f"another process writes to {folder}: wait until it has ended",
                        code="log.in_use",
                    ) from None
                time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(fd)
