"""A disk that keeps only what was synced.

While it records, every fsync moves what it is for to the durable state: a file's bytes, or a
directory's list of names. All else is lost in a power cut: the most that a file system may lose.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Disk:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._names: dict[int, dict[str, int]] = {}
        """By a directory's inode: its names, and the inodes that they lead to."""
        self._bytes: dict[int, bytes] = {}
        self._pins: dict[int, int] = {}
        """An open descriptor of each inode: its number is not used again while this is so."""
        self._top = root.stat().st_ino
        for folder, _, files in os.walk(root):
            self._keep_directory(Path(folder))
            for name in files:
                self._keep_file(Path(folder, name))

    @contextmanager
    def recording(self, after_each: Callable[[], None]) -> Iterator[None]:
        """Calls back after each fsync, when the durable state has changed."""
        real, one_by_one = os.fsync, threading.Lock()

        def fsync(file: Any) -> None:
            real(file)
            path = Path(os.readlink(f"/proc/self/fd/{file}"))
            if path.is_relative_to(self._root):
                with one_by_one:  # several threads sync at once
                    self._keep_directory(path) if path.is_dir() else self._keep_file(path)
                    after_each()

        setattr(os, "fsync", fsync)  # noqa: B010
        try:
            yield
        finally:
            os.fsync = real
            for pin in self._pins.values():
                os.close(pin)
            self._pins.clear()

    def after_a_power_cut(self, target: Path) -> None:
        """Writes what is left."""
        self._restore(self._top, target)

    def _restore(self, inode: int, target: Path) -> None:
        if inode not in self._names:
            # A directory that was never synced is empty, and so is a file.
            target.write_bytes(self._bytes.get(inode, b""))
            return
        target.mkdir()
        for name, inner in self._names[inode].items():
            self._restore(inner, target / name)

    def _keep_directory(self, path: Path) -> None:
        with os.scandir(path) as found:
            entries = list(found)
        self._names[path.stat().st_ino] = {one.name: one.inode() for one in entries}
        for one in entries:
            if one.inode() not in self._pins:
                self._pins[one.inode()] = os.open(one.path, os.O_PATH | os.O_NOFOLLOW)
            if one.is_dir():
                self._names.setdefault(one.inode(), {})

    def _keep_file(self, path: Path) -> None:
        self._bytes[path.stat().st_ino] = path.read_bytes()
