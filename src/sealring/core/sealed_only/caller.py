"""Finds the line of the user's or a framework's code that made a call."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Final

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
