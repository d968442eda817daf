"""Files of a log: read with a limit, written whole and durably, and one writer at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sealring.errors import LogError, LogInUse, NotALog

LEFT_BEHIND: Final = frozenset({".lock", ".new"})
"""What a writer may leave in a folder in which it has written nothing."""
_POLL_SECONDS: Final = 0.05
_MORE_BYTES: Final = 65536
"""Read at a time of a file that has grown since it was opened."""


def read_limited(
    path: Path | str, limit: int, error: type[LogError] = NotALog, *, links: bool = True
) -> bytes | None:
    """A regular file of at most `limit` bytes; None if there is none, `error` for all else.

    Without `links`, a name that is a symbolic link is refused as well.
    """
    # O_NONBLOCK: a FIFO that somebody placed there must not hang the reader.
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
    except OSError as problem:  # a disk or a network that fails
        raise error(f"{path} cannot be read: {problem.strerror}") from None
    finally:
        os.close(fd)
    if len(content) > limit:
        raise error(f"{path} is larger than {limit} bytes, so it is something else")
    return content


class Batch:
    """Files that must be on the disk before something else is written.

    A file appears under its name whole or not at all. `sync` makes the names durable.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._waiting = root / ".new"
        self._changed: set[Path] = set()

    def clear(self) -> None:
        """Removes what a writer that was killed left behind."""
        shutil.rmtree(self._waiting, ignore_errors=True)

    def write(self, name: str, content: bytes) -> None:
        path = self._root / name
        waiting = self.new_name()
        self._make(path.parent)
        fd = os.open(waiting, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            with open(fd, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(fd)
            os.replace(waiting, path)
        except BaseException:
            # On a full disk each attempt would leave a file, until there is no room for names.
            with contextlib.suppress(OSError):
                os.unlink(waiting)
            raise
        self._changed.add(path.parent)

    def new_name(self) -> Path:
        """A name for an unfinished file, in a folder that all processes of a run share."""
        # A stranger may have put a file or a link to elsewhere in its place.
        with contextlib.suppress(OSError):
            if not stat.S_ISDIR(os.lstat(self._waiting).st_mode):
                os.unlink(self._waiting)
        self._make(self._waiting)
        return self._waiting / secrets.token_hex(8)

    def write_new(self, name: str, content: bytes) -> bool:
        """The same for a file that another process may write as well: the first one stays.

        On the disk when it returns. False: there was one already.
        """
        waiting = f"{self._waiting.name}/{secrets.token_hex(8)}.new"
        self.write(waiting, content)
        path = self._root / name
        self._make(path.parent)
        try:
            os.link(self._root / waiting, path)
        except FileExistsError:
            return False
        finally:
            os.unlink(self._root / waiting)
        self._changed.add(path.parent)
        self.sync()
        return True

    def sync(self) -> None:
        for folder in sorted(self._changed, reverse=True):  # a folder before the one that names it
            _sync_folder(folder)
        self._changed.clear()

    def _make(self, folder: Path) -> None:
        if folder.is_dir():
            return
        self._make(folder.parent)
        folder.mkdir(exist_ok=True)
        self._changed.add(folder.parent)


@contextlib.contextmanager
def locked(folder: Path, seconds: float = 0.0) -> Iterator[None]:
    """Holds the folder's lock, for which it waits up to `seconds`. It ends with the process."""
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
                    raise LogInUse(
                        f"another process writes to {folder}: wait until it has ended"
                    ) from None
                time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(fd)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
