"""Turns sealed-only mode on. Imports nothing of torch before torch.distributed is loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Final

from sealring.core.sealed_only.setting import OFF, calling_line, put_mark_on, turn_on
from sealring.core.settings import ONLY
from sealring.errors import PlaintextGroup

_LOADING: Final = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_watching = False


def _watch_children() -> None:
    """Turns the mode on for this process's children. Calling this twice is harmless."""
    global _watching
    turn_on()
    put_mark_on()
    _refuse_not_loaded(os.environ, "this process's environment")
    # Other values are reported when the first group is made.
    if os.environ.get(ONLY.name, "") in OFF:
        os.environ[ONLY.name] = "1"
    if not _watching:
        _watching = True
        sys.addaudithook(_audit)


def _refuse_not_loaded(environ: Mapping[str, str], where: str) -> None:
    if environ.get(_LOADING) == "0":
        raise PlaintextGroup(
            f"{where} has {_LOADING}=0, with which torch does not load sealring's guard, and this "
            f"job is sealed-only: unset {_LOADING}"
        )


def _refuse_switched_off(environ: Mapping[str, str]) -> None:
    if environ.get(ONLY.name, "1") != "1":
        raise PlaintextGroup(
            f"{calling_line()} sets {ONLY.name}={environ[ONLY.name]} in the environment of a "
            f"process, and this job is sealed-only: leave {ONLY.name} as it is"
        )


_STARTS: Final = {"subprocess.Popen": 3, "os.exec": 2, "os.posix_spawn": 2}
"""Python's audit events for a starting program, with the index of the environment among their
arguments. None as the environment means this process's own."""


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _STARTS:
        if (environ := arguments[_STARTS[event]]) is not None:
            changed = _as_text(environ)
            _refuse_not_loaded(changed, f"the process that {calling_line()} starts")
            _refuse_switched_off(changed)
    elif event == "os.putenv":
        changed = _as_text(dict([arguments]))
        _refuse_not_loaded(changed, calling_line())
        _refuse_switched_off(changed)


def _as_text(environ: Any) -> dict[str, str]:
    return {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()}


def require_sealed() -> None:
    """From now on, every process group of this process and of its children is sealed.

    If a group asks for another backend, sealring serves it instead, where that is possible.
    Otherwise `PlaintextGroup` names the line that asked for it. Groups that were made before are
    not changed: if one of them is in plaintext, this raises `PlaintextGroup`. It cannot be undone.
    """
    _watch_children()
    if "torch.distributed" in sys.modules:
        guard()
        from sealring.core.sealed_only import groups

        groups.refuse_existing()


def guard() -> None:
    """Turns the mode on in a process that has loaded torch.distributed. Twice is harmless.

    It ignores existing groups, because those in a forked child are its parent's.
    """
    from sealring.core.sealed_only import doors, groups

    groups.seal_by_default()
    doors.refuse_all()
    doors.close_as_they_load()
    _watch_children()
