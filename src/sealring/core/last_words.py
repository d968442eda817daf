"""Reports the error that ends a worker to the launcher, `sealring run`.

The launcher starts many workers, and usually one cause ends all of them. Each worker writes its
error to the file that torch's launcher gave it. At the end the launcher prints the error that
caused the others, once. The traceback of an error that is not sealring's is printed by the worker,
as Python does.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from sealring.errors import GroupClosed, PeerLost, PeerSilent, PeerUnreachable, SealringError, named
from sealring.formats.strict import read_json

LAUNCHED: Final = "_SEALRING_LAUNCHED"
"""The environment variable that `sealring run` sets for its workers."""
_ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
_FOLLOW: Final = (GroupClosed, PeerLost, PeerSilent, PeerUnreachable)
"""The errors that a worker gets because another worker has ended."""
_MOST: Final = 10_000
"""The most characters of an error's text. A longer text would hide what was printed before."""
_OURS, _TORCHS = (f"{os.sep}{name}{os.sep}" for name in ("sealring", "torch"))


def tell_the_launcher() -> None:
    """Makes this worker report the error that ends it, if `sealring run` started it."""
    # Removed, so that processes that the worker starts do not report their errors as its own.
    launched = os.environ.pop(LAUNCHED, "")
    if not launched or not os.environ.get(_ERROR_FILE):
        return
    # Read now: a script may empty the environment.
    worker, rank, file = os.getpid(), int(os.environ["RANK"]), Path(os.environ[_ERROR_FILE])

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failed, cause = _cause(rank, error)
        is_told = os.getpid() == worker and isinstance(cause, Exception)
        written = is_told and _write(file, _content(rank, failed, cause, trace))
        if not written or not isinstance(cause, SealringError):
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = tell


def _cause(rank: int, error: BaseException) -> tuple[int, BaseException]:
    """The rank that failed and its error, if `error` only carries other errors.

    torch.distributed.checkpoint raises a CheckpointException on every rank. It is a BaseException,
    and its text consists of the tracebacks of all ranks that failed.
    """
    checkpoint: Any = sys.modules.get("torch.distributed.checkpoint.api")
    while True:
        if isinstance(error, BaseExceptionGroup):
            carried = [(rank, each) for each in error.exceptions]
        elif checkpoint is not None and isinstance(error, checkpoint.CheckpointException):
            carried = [(number, each) for number, (each, _) in sorted(error.failures.items())]
        else:
            return rank, error
        # Prefer an error that is not the consequence of another rank's end.
        rank, error = min(carried, key=lambda each: isinstance(each[1], _FOLLOW))


def _content(
    rank: int, failed: int, error: BaseException, trace: TracebackType | None
) -> dict[str, Any]:
    ours = isinstance(error, SealringError)
    try:
        said = str(error)
    except Exception:  # an exception class of the script may fail here
        said = "<exception str() failed>"  # as Python prints it
    text = f"{named(error)}: {said}"
    return {
        "message": {
            "message": text if len(text) <= _MOST else f"{text[:_MOST]}...",
            "extraInfo": {
                "py_callstack": "".join(_script_frames(trace)) if ours else "",
                "timestamp": str(int(time.time())),
                "time": time.time(),
                "rank": rank,
                "failed": failed,
                "follows": isinstance(error, _FOLLOW),
                "printed": not ours,
            },
        }
    }


def _write(file: Path, content: dict[str, Any]) -> bool:
    try:
        # Atomically: the launcher may end this worker now, and must not read half a file.
        unfinished = file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(content))
        unfinished.replace(file)
    except OSError:
        return False
    return True


def _script_frames(trace: TracebackType | None) -> list[str]:
    """The script's frames that led to the error: those before sealring's first, without torch's."""
    before = itertools.takewhile(
        lambda frame: _OURS not in frame.filename, traceback.extract_tb(trace)
    )
    return traceback.format_list([each for each in before if _TORCHS not in each.filename])


@dataclass(frozen=True, slots=True)
class LastWords:
    rank: int
    """The worker that wrote the file."""
    failed: int
    """The rank whose error it is. It may be another one: a checkpoint's error reaches all ranks."""
    text: str
    """The lines of the script that led to the error, and the error."""
    time: float
    follows: bool
    """Whether the error is only the consequence of another worker's end."""
    printed: bool
    """Whether the worker has printed the traceback."""


def read_error_files(error_file: str) -> list[LastWords]:
    """Reads the errors of this machine's workers, in the order of time.

    `error_file` is one worker's file. A worker may have written its error and still be running when
    the launcher sees others end.
    """
    found = []
    for file in Path(error_file).parent.parent.glob(f"*/{Path(error_file).name}"):
        try:
            message = read_json(file.read_text())["message"]
            info = message["extraInfo"]
            text = f"{info['py_callstack']}{message['message']}"
            found.append(
                LastWords(
                    int(info["rank"]), int(info["failed"]), text, float(info["time"]),
                    follows=bool(info["follows"]), printed=bool(info["printed"]),
                )
            )  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            continue  # a file that torch or the script wrote, or half a file
    return sorted(found, key=lambda each: each.time)
