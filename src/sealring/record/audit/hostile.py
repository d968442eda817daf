"""A run's folder comes from a stranger: what it may hold is checked before anything is read."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Final

from sealring.errors import MalformedRun

MAX_FILES: Final = 400_000
MAX_BYTES: Final = 4 << 30
MAX_DEPTH: Final = 12
_OF_A_RUN: Final = re.compile(
    r"run\.json|statements/[0-9a-z][0-9a-z-]{0,99}\.dsse\.json|evidence/[0-9a-f]{64}"
    r"|log/(checkpoint|\.lock|tile/([0-9]|entries)/(x[0-9]{3}/)*[0-9]{3}(\.p/[0-9]{1,3})?)"
    r"|(log/)?\.new/[0-9a-f]{16}(\.new)?"
)
"""Files of a run's folder. In `.new` is what a writer left that was killed."""


def check_folder(path: Path) -> None:
    """MalformedRun if there is a symlink, a special or another file, or more than is read."""
    files = size = 0
    below = len(os.path.join(path, ""))
    waiting = [(path, 0)]
    while waiting:
        folder, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise MalformedRun(f"{_below(folder, path)} is deeper than {MAX_DEPTH} folders")
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append((Path(entry.path), depth + 1))
                    elif not stat.S_ISREG(status.st_mode):
                        raise MalformedRun(
                            f"{_below(Path(entry.path), path)} is a symlink or a special file, and "
                            "a run's folder has none: take a copy of the files themselves"
                        )
                    elif not _OF_A_RUN.fullmatch(entry.path[below:]):
                        raise MalformedRun(
                            f"{_below(Path(entry.path), path)} is no file of a run: a run's folder "
                            "has no others, so that nothing in it goes unread"
                        )
                    files, size = files + 1, size + status.st_size
                    if files > MAX_FILES or size > MAX_BYTES:
                        raise MalformedRun(
                            f"{path} has more than {MAX_FILES} files or {MAX_BYTES >> 30} GiB, "
                            "which is more than an audit reads"
                        )
        except OSError as problem:
            raise MalformedRun(
                f"{_below(folder, path)} cannot be read: {problem.strerror}"
            ) from None


def _below(path: Path, root: Path) -> str:
    return repr(str(path.relative_to(root)))[:200]
