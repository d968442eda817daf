"""Whether a process is in sealed-only mode: by SEALRING_ONLY, or because one above it is.

A process in the mode marks itself by a pattern of ignored signals, which its children inherit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Final

from sealring.errors import ConfigurationError

_IGNORED: Final = (42, 44, 46)
"""Numbers of real-time signals as the kernel counts them. (C libraries differ in SIGRTMIN.)"""
_BETWEEN: Final = (43, 45)
_SIG_IGN: Final = 1


def _mask(signals: tuple[int, ...]) -> int:
    return sum(1 << (number - 1) for number in signals)


_MARK: Final = _mask(_IGNORED)
_COMPARED: Final = _mask(_IGNORED + _BETWEEN)


def put_mark_on() -> None:
    """Marks this process by ignoring `_IGNORED`, except signals that it handles. Twice is
    harmless."""
    import ctypes  # here: `import torch` loads this module in processes that are not sealed-only

    with open("/proc/self/status", "rb") as file:
        handled = _signals(file.read(), b"SigCgt")
    # Not signal.signal, which only the main thread may call.
    libc = ctypes.CDLL(None)
    for number in _IGNORED:
        if not handled & _mask((number,)):
            libc.signal(number, _SIG_IGN)


def is_inherited() -> bool:
    """Whether this process, or one above it, is marked."""
    process = b"self"
    while process != b"0":  # the parent of the first process
        try:
            with open(b"/proc/" + process + b"/status", "rb", buffering=0) as file:
                status = file.read()
        except OSError:
            # The process has ended, or /proc hides it (hidepid). Its children were read before.
            return False
        if _signals(status, b"SigIgn") & _COMPARED == _MARK:
            return True
        process = _field(status, b"PPid")
    return False


def _signals(status: bytes, name: bytes) -> int:
    return int(_field(status, name) or b"0", 16)


def _field(status: bytes, name: bytes) -> bytes:
    return status.partition(b"\n" + name + b":\t")[2].partition(b"\n")[0]


_NAME: Final = "SEALRING_ONLY"
OFF: Final = ("", "0")

_on = False


def turn_on() -> None:
    """Turns the mode on for the life of the process.

    A variable is not enough: libraries may empty the environment for a while (accelerate does).
    """
    global _on
    _on = True


def is_on() -> bool:
    """Whether the mode was turned on in this process."""
    return _on


def is_required(environ: Mapping[str, str]) -> bool:
    from sealring.core.settings import ONLY  # here: `import torch` loads this module

    wanted = ONLY.read(environ)
    return _on or wanted or is_inherited()


def refuse_to_measure(environ: Mapping[str, str]) -> None:
    if is_required(environ):
        raise ConfigurationError(
            f"this command measures plaintext groups beside sealed ones: unset {_NAME}, and do "
            "not start it from a sealed-only job"
        )


def may_be_required(environ: Mapping[str, str]) -> bool:
    """Whether the mode may be required; never raises, and is True for an invalid value.

    Torch would report an error during its import with the advice to switch off the loading of
    backends. So an invalid value is reported when the first group is made.
    """
    return _on or environ.get(_NAME, "") not in OFF or is_inherited()


# ---- where in the user's code, or a framework's, a call came from

_OURS: Final = f"{Path(__file__).parents[2]}{os.sep}"
_PYTHONS: Final = f"{Path(os.__file__).parent}{os.sep}"


def calling_line() -> str:
    """The innermost line outside of torch, Python and sealring, as file:line."""
    innermost: FrameType = sys._getframe(1)
    frame: FrameType | None = innermost
    while frame is not None:
        innermost = frame
        if not _is_below_the_script(frame.f_code.co_filename):
            break
        frame = frame.f_back
    # If there is none (a helper process of torch), this is the outermost line.
    return f"{innermost.f_code.co_filename}:{innermost.f_lineno}"


def _is_below_the_script(filename: str) -> bool:
    torch = sys.modules.get("torch")
    torchs = f"{Path(torch.__file__).parent}{os.sep}" if torch and torch.__file__ else _OURS
    # Installed packages may be in a subfolder of Python's own folder.
    pythons = filename.startswith(_PYTHONS) and "-packages" not in filename
    return pythons or filename.startswith((_OURS, torchs, "<frozen "))
