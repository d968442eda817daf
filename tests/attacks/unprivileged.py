"""Runs a command as a user without rights, for attacks that root would win in any case.

The interpreter or the checkout may lie in a folder that only root may enter (/root, often). The
command therefore gets a mount namespace of its own, in which such a folder is replaced by an empty
one that holds only the paths that are needed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

USER: Final = 65534
"""The id of the user without rights: it owns no file and no other process."""

CHECKOUT: Final = Path(__file__).resolve().parents[2]

_NEEDED: Final = ("unshare", "setpriv", "mount")


def why_not() -> str | None:
    """Returns why `start` cannot work here, or None."""
    if os.getuid() != 0:
        return None
    missing = [tool for tool in _NEEDED if shutil.which(tool) is None]
    if missing:
        return f"root needs {', '.join(missing)} to run a command as another user"
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode:
        return "this machine allows no mount namespace"
    return None


needs_unprivileged = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def start(command: list[str], **options: Any) -> subprocess.Popen[Any]:
    """Starts the command as a user without rights; as ourselves if we are not root.

    `options` go to subprocess.Popen. Its files must be readable by everybody.
    """
    if os.getuid() != 0:
        return subprocess.Popen(command, **options)
    return subprocess.Popen(
        ["unshare", "--mount", "sh", "-ec", _script(), "sh", *command], **options
    )


def write_interpreter(path: Path) -> Path:
    """Writes a program that is Python, run as a user without rights."""
    command = shlex.join(["unshare", "--mount", "sh", "-ec", _script(), "sh", sys.executable])
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)
    return path


def _script() -> str:
    """Shell commands that end with running their arguments as a user without rights."""
    become = (
        f"exec setpriv --reuid {USER} --regid {USER} --clear-groups --bounding-set=-all "
        '--inh-caps=-all --no-new-privs -- "$@"'
    )
    return "\n".join(["mount --make-rprivate /", open_paths(), become])


def open_paths() -> str:
    """Shell commands that make the interpreter and the checkout reachable by everybody."""
    by_closed: dict[Path, list[Path]] = {}
    for path in (Path(sys.base_prefix), Path(sys.prefix), CHECKOUT):
        closed = next(
            (p for p in [*reversed(path.parents), path] if not p.stat().st_mode & 1), None
        )
        if closed is not None and path not in by_closed.setdefault(closed, []):
            by_closed[closed].append(path)
    lines = ["mount -t tmpfs tmpfs /mnt"]  # in our namespace alone: nothing is left behind
    for number, (closed, paths) in enumerate(by_closed.items()):
        kept = [f"/mnt/{number}-{index}" for index in range(len(paths))]
        for path, keep in zip(paths, kept, strict=True):
            lines.append(f"mkdir {keep} && mount --bind {shlex.quote(str(path))} {keep}")
        lines.append(f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(closed))}")
        for path, keep in zip(paths, kept, strict=True):
            there = shlex.quote(str(path))
            lines.append(f"mkdir -p {there} && mount --bind {keep} {there}")
    return "\n".join(lines)
