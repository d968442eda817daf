"""Source files that must stay as they are while they are sealed."""

from __future__ import annotations

import os

from sealring.errors import BadSource


class Watched:
    """Files that are read. `check` is an error if one was changed since it was first seen."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, ...]] = {}

    def see(self, path: str, state: os.stat_result) -> None:
        found = state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns
        if self._seen.setdefault(path, found) != found:
            raise BadSource(
                f"{path} was changed while it was sealed: nothing of it was committed. Do it "
                "again when it no longer changes",
                code="vault.source_changed",
            )

    def check(self) -> None:
        for path in self._seen:
            try:
                self.see(path, os.lstat(path))
            except FileNotFoundError:
                raise BadSource(
                    f"{path} was removed while it was sealed", code="vault.source_changed"
                ) from None
