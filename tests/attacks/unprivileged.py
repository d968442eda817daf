"""Runs a command as a user without privileges, for attacks that root would always win.

The interpreter or the checkout may be in a folder that only root may enter, often /root. The
command therefore gets its own mount namespace. There, an empty folder replaces each such folder and
holds only the paths that the command needs.
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
"""The id of the user without privileges; it owns no file and no other process."""

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
    """Starts the command as a user without privileges, or as this user if this is not root.

    `options` go to subprocess.Popen. Everybody must be able to read the files that it uses.
    """
    if os.getuid() != 0:
        return subprocess.Popen(command, **options)
    return subprocess.Popen(
        ["unshare", "--mount", "sh", "-ec", _script(), "sh", *command], **options
    )


def write_interpreter(path: Path) -> Path:
    """Writes a program that starts Python as a user without privileges."""
    command = shlex.join(["unshare", "--mount", "sh", "-ec", _script(), "sh", sys.executable])
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)
    return path


def _script() -> str:
    """Returns shell commands that run their arguments as a user without privileges."""
    become = (
        f"exec setpriv --reuid {USER} --regid {USER} --clear-groups --bounding-set=-all "
        '--inh-caps=-all --no-new-privs -- "$@"'
    )
    return "\n".join(["mount --make-rprivate /", open_paths(), become])


def open_paths() -> str:
    """Returns shell commands that let everybody reach the interpreter and the checkout."""
    by_closed: dict[Path, list[Path]] = {}
    for path in (Path(sys.base_prefix), Path(sys.prefix), CHECKOUT):
        closed = next(
            (p for p in [*reversed(path.parents), path] if not p.stat().st_mode & 1), None
        )
        if closed is not None and path not in by_closed.setdefault(closed, []):
            by_closed[closed].append(path)
    lines = ["mount -t tmpfs tmpfs /mnt"]  # only in the new namespace, so nothing is left behind
    for number, (closed, paths) in enumerate(by_closed.items()):
        kept = [f"/mnt/{number}-{index}" for index in range(len(paths))]
        for path, keep in zip(paths, kept, strict=True):
            lines.append(f"mkdir {keep} && mount --bind {shlex.quote(str(path))} {keep}")
        lines.append(f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(closed))}")
        for path, keep in zip(paths, kept, strict=True):
            there = shlex.quote(str(path))
            lines.append(f"mkdir -p {there} && mount --bind {keep} {there}")
    return "\n".join(lines)
