"""An error of ours that ends a worker, told to the launcher that prints it.

`sealring run` starts many workers, and one cause ends most of them. Each writes its error into the
file that torch's launcher gave it; the launcher prints the first one, once, after everything else.
Errors that are not ours are printed by the worker itself, as Python does.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Final

from sealring.errors import SealringError

LAUNCHED: Final = "_SEALRING_LAUNCHED"
"""Set by `sealring run`, for its workers."""
_ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
_OURS, _TORCHS = (f"{os.sep}{name}{os.sep}" for name in ("sealring", "torch"))


def tell_the_launcher() -> None:
    """From here on an error of ours that ends this worker is the launcher's to print."""
    if os.environ.get(LAUNCHED) and os.environ.get(_ERROR_FILE):
        sys.excepthook = _tell


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, SealringError) or not _write(error, trace):
        sys.__excepthook__(kind, error, trace)


def _write(error: SealringError, trace: TracebackType | None) -> bool:
    text = f"{type(error).__name__}: {error}"
    content = {
        "message": {
            "message": text,
            "extraInfo": {
                "py_callstack": "".join(_script_frames(trace)),
                "timestamp": str(int(time.time())),
            },
        }
    }
    try:
        Path(os.environ[_ERROR_FILE]).write_text(json.dumps(content))
    except OSError:
        return False
    return True


def _script_frames(trace: TracebackType | None) -> list[str]:
    """Where in the script it was: the frames before the first of ours, without torch's."""
    before = itertools.takewhile(
        lambda frame: _OURS not in frame.filename, traceback.extract_tb(trace)
    )
    return traceback.format_list([each for each in before if _TORCHS not in each.filename])
