"""Secrets on disk: read only where no other user can read them, and written in the same way.

Every write of the project that fails is named by `not_written`: a full disk is `DiskFull`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sealring import _native
from sealring.errors import ConfigurationError, DiskFull
from sealring.identity.process import shut_out_debuggers

_MAX_FILE_BYTES = 1 << 20
_LONGEST_NAME = 255
"""Bytes: what Linux's file systems take."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def is_full(problem: OSError) -> bool:
    """Whether a file system or a quota has no space left."""
    return problem.errno in _FULL


def not_written(what: object, problem: OSError, done: str = "written") -> ConfigurationError:
    """The error of a file that cannot be written, or of a directory that cannot be "made"."""
    text = f"{what} cannot be {done}: "
    if is_full(problem):
        why = os.strerror(problem.errno or 0)  # the native core adds what it wrote
        return DiskFull(
            f"{text}{why}. Free some space there or choose another disk, and run it again"
        )
    return ConfigurationError(f"{text}{problem.strerror}")


@contextlib.contextmanager
def writing(what: object, done: str = "written") -> Iterator[None]:
    """Raises errors of the system as `not_written` names them."""
    try:
        yield
    except OSError as problem:
        raise not_written(what, problem, done) from problem


def read_private(path: Path, what: str, error: type[ConfigurationError]) -> bytes:
    """The content of a file that only this user can read, or `error`.

    The checks are made on the opened file, not on its name, so it cannot be exchanged between the
    check and the read. O_NONBLOCK keeps a FIFO placed there from hanging the worker.
    """
    secret = read_secret_file(path, what, error)
    content = bytes(secret)
    secret.wipe()
    return content


def read_secret_file(path: Path, what: str, error: type[ConfigurationError]) -> _native.Secret:
    """As read_private, without a copy that cannot be overwritten."""
    shut_out_debuggers()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as problem:
        raise error(f"{what} {path} cannot be read: {problem.strerror}") from problem
    try:
        _check_private(os.fstat(fd), path, what, error)
        size = os.fstat(fd).st_size
        _check_size(size, path, what, error)
        content = _native.Secret.zeros(size)
        read = os.readv(fd, [content])
    except OSError as problem:
        raise error(f"{what} {path} cannot be read: {problem.strerror}") from problem
    finally:
        os.close(fd)
    return content.part(0, read)


def read_public(path: Path, what: str, error: type[ConfigurationError]) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as problem:
        raise error(f"{what} {path} cannot be read: {problem.strerror}") from problem
    _check_size(len(content), path, what, error)
    return content


def write_private(path: Path, content: bytes | bytearray) -> None:
    """Write a new file of mode 0600. It appears whole or not at all, and replaces nothing."""
    temporary = _write_temporary(path, content, 0o600)
    try:
        # link(), unlike rename(), fails if the name is taken.
        os.link(temporary, path)
    except FileExistsError:
        raise ConfigurationError(
            f"{path} is there already and will not be overwritten: move it away first"
        ) from None
    except OSError as problem:
        raise not_written(path, problem) from problem
    finally:
        os.unlink(temporary)
    _sync_parent(path)


def name_beside(name: str, ending: str) -> str:
    """A hidden name that begins as this one does and is no longer than a file's name may be."""
    room = _LONGEST_NAME - len(".") - len(ending)
    return f".{os.fsencode(name)[:room].decode(errors='ignore')}{ending}"


def sync_directory(path: Path) -> None:
    """After this a file that was made or renamed there is there after a power loss too."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_public(path: Path, content: bytes) -> None:
    """Write a file of mode 0644, whole or not at all; an older one is replaced."""
    _replace(path, content, 0o644)


def replace_private(path: Path, content: bytes) -> None:
    """Write a file of mode 0600, whole or not at all; an older one is replaced."""
    _replace(path, content, 0o600)


def _replace(path: Path, content: bytes, mode: int) -> None:
    with contextlib.suppress(OSError):
        if not stat.S_ISREG((found := path.stat()).st_mode) and not stat.S_ISDIR(found.st_mode):
            # A rename would put a file in the place of /dev/stdout, for every program.
            raise ConfigurationError(f"{path} is not a regular file, and is not replaced")
    temporary = _write_temporary(path, content, mode)
    try:
        os.replace(temporary, path)
    except OSError as problem:
        os.unlink(temporary)
        raise not_written(path, problem) from problem
    _sync_parent(path)


def _sync_parent(path: Path) -> None:
    try:
        sync_directory(path.parent)
    except OSError as problem:
        raise ConfigurationError(
            f"{path} was written, and may be lost in a power cut: {problem.strerror}"
        ) from problem


def _check_private(
    status: os.stat_result, path: Path, what: str, error: type[ConfigurationError]
) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise error(f"{what} {path} is not a regular file")
    if status.st_uid != os.geteuid():
        raise error(
            f"{what} {path} belongs to user {status.st_uid}, and this worker runs as user "
            f"{os.geteuid()}: run `chown {os.geteuid()} {path}`"
        )
    if status.st_mode & 0o077:
        raise error(
            f"{what} {path} can be used by others than its owner "
            f"(mode {stat.S_IMODE(status.st_mode):04o}): run `chmod 600 {path}`"
        )


def _write_temporary(path: Path, content: bytes | bytearray, mode: int) -> Path:
    temporary = path.with_name(name_beside(path.name, f".{secrets.token_hex(8)}"))
    with writing(path):
        fd = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
    try:
        with (
            open(fd, "wb", buffering=0) as file,
            memoryview(content) as left,
        ):  # no copy in a buffer
            os.fchmod(fd, mode)
            done = 0
            while done < len(left):
                done += file.write(left[done:])
            os.fsync(fd)
    except OSError as problem:
        os.unlink(temporary)
        raise not_written(path, problem) from problem
    return temporary


def _check_size(size: int, path: Path, what: str, error: type[ConfigurationError]) -> None:
    if size > _MAX_FILE_BYTES:
        raise error(
            f"{what} {path} is larger than {_MAX_FILE_BYTES} bytes, so it is something else"
        )
