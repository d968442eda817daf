"""Child processes are in sealed-only mode too: through their environment, which torch reads first.

A Python that imports torch loads our entry point, which finds SEALRING_ONLY. Where that loading is
switched off, or the setting is taken out, the child would run unguarded: it is not started.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final

from sealring.errors import PlaintextGroup
from sealring.sealed_only.caller import calling_line
from sealring.sealed_only.setting import SETTING, turn_on

_LOADING: Final = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_watching = False


def inherit(environ: MutableMapping[str, str]) -> None:
    _refuse_not_loaded(environ, "this process's environment")
    environ[SETTING] = "1"


def watch() -> None:
    """A second call changes nothing."""
    global _watching
    turn_on()
    _refuse_not_loaded(os.environ, "this process's environment")
    if not _watching:
        _watching = True
        sys.addaudithook(_audit)


def _refuse_not_loaded(environ: Mapping[str, str], where: str) -> None:
    if environ.get(_LOADING) == "0":
        raise PlaintextGroup(
            f"{where} has {_LOADING}=0, with which torch does not load sealring's guard, and this "
            f"job is sealed-only: unset {_LOADING}"
        )


def _refuse_not_required(where: str) -> None:
    raise PlaintextGroup(
        f"{where} takes {SETTING}=1 out of the environment of a process, and this job is "
        "sealed-only: keep the variable there"
    )


_STARTS: Final = {"subprocess.Popen": 3, "os.exec": 2, "os.posix_spawn": 2}
"""Audit events of Python's for a program that starts: where among their arguments its environment
is. The program comes first."""


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _STARTS:
        environ = arguments[_STARTS[event]]
        _refuse_unguarded(arguments[0], os.environ if environ is None else _as_text(environ))
    elif event == "os.putenv":
        name, value = map(os.fsdecode, arguments)
        if name == _LOADING:
            _refuse_not_loaded({name: value}, calling_line())
        if name == SETTING and value != "1":
            _refuse_not_required(calling_line())


def _refuse_unguarded(program: Any, environ: Mapping[str, str]) -> None:
    _refuse_not_loaded(environ, f"the process that {calling_line()} starts")
    name = Path(os.fsdecode(program)).name
    # Compilers, git and the like make no process groups: their environment may be empty.
    if name.startswith("python") and environ.get(SETTING) != "1":
        _refuse_not_required(calling_line())


def _as_text(environ: Any) -> dict[str, str]:
    return {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()}
