"""Where in the user's code, or a framework's, a call came from."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Final

_OURS: Final = f"{Path(__file__).parents[2]}{os.sep}"
_PYTHONS: Final = f"{Path(os.__file__).parent}{os.sep}"


def calling_line() -> str:
    """The innermost line that is neither torch's, Python's nor ours, as file:line."""
    innermost: FrameType = sys._getframe(1)
    frame: FrameType | None = innermost
    while frame is not None:
        innermost = frame
        if not _is_below_the_script(frame.f_code.co_filename):
            break
        frame = frame.f_back
    # A helper process of torch's own has nothing else on its stack: its outermost line.
    return f"{innermost.f_code.co_filename}:{innermost.f_lineno}"


def _is_below_the_script(filename: str) -> bool:
    torch = sys.modules.get("torch")
    torchs = f"{Path(torch.__file__).parent}{os.sep}" if torch and torch.__file__ else _OURS
    # Installed packages may lie in a folder of Python's own.
    pythons = filename.startswith(_PYTHONS) and "-packages" not in filename
    return pythons or filename.startswith((_OURS, torchs, "<frozen "))
