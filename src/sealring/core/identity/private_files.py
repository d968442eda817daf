"""Secrets on disk, read only where no other user can read them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from sealring import _native
from sealring.core.identity.process import shut_out_debuggers
from sealring.errors import ConfigurationError
from sealring.formats.files import check_size


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
    """Like `read_private`, without a copy that cannot be overwritten."""
    shut_out_debuggers()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as problem:
        raise error(f"{what} {path} cannot be read: {problem.strerror}") from problem
    try:
        _check_private(os.fstat(fd), path, what, error)
        size = os.fstat(fd).st_size
        check_size(size, path, what, error)
        content = _native.Secret.zeros(size)
        read = os.readv(fd, [content])
    except OSError as problem:
        raise error(f"{what} {path} cannot be read: {problem.strerror}") from problem
    finally:
        os.close(fd)
    return content.part(0, read)


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
