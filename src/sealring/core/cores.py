"""How many cores this worker may use, by its CPU mask and the limits of its control groups."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """Returns at least 1. `root` is the directory that contains proc and sys."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, min([allowed, *_limits(root)]))


def _limits(root: Path) -> list[int]:
    """The limits, in whole cores, of the control groups that contain this process."""
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        folder = base / path.lstrip("/")
        for each in (folder, *folder.parents):
            if not each.is_relative_to(base):
                break
            found += _limit(each)
    return found


def _limit(folder: Path) -> list[int]:
    """A control group's limit; [] if there is none.

    Version 2 has one file with "max 100000" or "200000 100000", version 1 has two files.
    """
    quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
    if not quota:
        quota = _read(folder / "cpu.cfs_quota_us").strip()
        period = _read(folder / "cpu.cfs_period_us").strip()
    if not quota.isdecimal() or not period.isdecimal() or int(period) == 0:
        return []
    return [max(1, int(quota) // int(period))]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
