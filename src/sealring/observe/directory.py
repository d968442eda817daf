"""The directory of the workers' sockets, closed to other users.

It is opened once, and the open descriptor is checked. Sockets in it are reached through that
descriptor (/proc/self/fd/N/NAME). So the directory cannot be replaced after the check, and its path
may be longer than the 107 bytes that a Unix socket's address can hold.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sealring.core.settings import LIVE
from sealring.errors import ConfigurationError

OFF: Final = "0"
SUFFIX: Final = ".sock"
MOST_SOCKETS: Final = 4096
"""The most names that are read from one directory."""


def chosen_directory(environ: Mapping[str, str], user: int | None = None) -> Path | None:
    """The directory for the sockets of a user's workers (default: this user). None if switched off.

    It is not in $TMPDIR or $XDG_RUNTIME_DIR: these differ between a scheduler's job and a login
    shell, and the second is deleted when the user logs out.
    """
    setting = LIVE.read(environ)
    if setting == OFF:
        return None
    if not setting:
        return Path(f"/tmp/sealring-{os.geteuid() if user is None else user}")  # noqa: S108
    return Path(setting)


class PrivateDirectory:
    """An open directory that belongs to `user` and that no other user may enter."""

    def __init__(self, path: Path, *, user: int | None = None, create: bool = False) -> None:
        """Raises ConfigurationError, or FileNotFoundError if it is missing and not created."""
        self.path = path
        self.user = os.geteuid() if user is None else user
        try:
            if create:
                _make(path)
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError as problem:
            raise ConfigurationError(
                f"{path}, the directory of workers' sockets, cannot be used: {problem.strerror}. "
                f"Set {LIVE.name} to another one"
            ) from problem
        try:
            self._check(os.fstat(self.fd))
        except BaseException:
            os.close(self.fd)
            raise

    def _check(self, status: os.stat_result) -> None:
        if status.st_uid != self.user:
            raise ConfigurationError(
                f"{self.path}, the directory of workers' sockets, belongs to user {status.st_uid} "
                f"and not to user {self.user}: set {LIVE.name} to a directory of your own"
            )
        if status.st_mode & 0o077:
            raise ConfigurationError(
                f"{self.path}, the directory of workers' sockets, is open to other users (mode "
                f"{stat.S_IMODE(status.st_mode):04o}): run `chmod 700 {self.path}`"
            )

    def address(self, name: str) -> str:
        """The address of a socket in the directory, for bind and connect."""
        return f"/proc/self/fd/{self.fd}/{name}"

    def sockets(self) -> list[str]:
        names: list[str] = []
        with os.scandir(self.fd) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
                    names.append(entry.name)
                if len(names) == MOST_SOCKETS:
                    break
        return sorted(names)

    def remove(self, name: str) -> None:
        os.unlink(name, dir_fd=self.fd)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def close(self) -> None:
        os.close(self.fd)


def _make(path: Path) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    except FileNotFoundError as problem:
        raise ConfigurationError(
            f"{path}, the directory of workers' sockets, cannot be made: {path.parent} does not "
            "exist"
        ) from problem


def pid_of(name: str) -> int:
    """The process id in a socket's name. 0 if there is none."""
    digits = os.path.basename(name).partition("-")[0]
    return int(digits) if digits.isdecimal() else 0
