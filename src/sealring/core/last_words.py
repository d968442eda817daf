"""The error that ends a worker, told to the launcher, which prints the cause of all.

`sealring run` starts many workers, and one cause ends most of them. Each writes its error into the
file that torch's launcher gave it; the launcher prints the one that caused the others, once, after
everything else. The traceback of an error that is not ours is printed by the worker itself, as
Python does.
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
"""Set by `sealring run`, for its workers."""
_ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
_FOLLOW: Final = (GroupClosed, PeerLost, PeerSilent, PeerUnreachable)
"""What a worker gets when another one has ended."""
_MOST: Final = 10_000
"""Characters of an error's text: a longer one would hide what the launcher printed before."""
_OURS, _TORCHS = (f"{os.sep}{name}{os.sep}" for name in ("sealring", "torch"))


def tell_the_launcher() -> None:
    """From here on the launcher knows of the error that ends this worker."""
    # Processes that the worker starts do not inherit it: their errors do not end the worker.
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
    """The rank that failed and its error, where `error` only carries the errors of others.

    torch.distributed.checkpoint raises one CheckpointException on every rank. It is no Exception,
    and its text is the tracebacks of all ranks that failed.
    """
    checkpoint: Any = sys.modules.get("torch.distributed.checkpoint.api")
    while True:
        if isinstance(error, BaseExceptionGroup):
            carried = [(rank, each) for each in error.exceptions]
        elif checkpoint is not None and isinstance(error, checkpoint.CheckpointException):
            carried = [(number, each) for number, (each, _) in sorted(error.failures.items())]
        else:
            return rank, error
        # An error that follows from another rank's end says less than the error of that rank.
        rank, error = min(carried, key=lambda each: isinstance(each[1], _FOLLOW))


def _content(
    rank: int, failed: int, error: BaseException, trace: TracebackType | None
) -> dict[str, Any]:
    ours = isinstance(error, SealringError)
    try:
        said = str(error)
    except Exception:  # the script's own class
        said = "<exception str() failed>"  # Python's words for it
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
        # At once: the launcher may end this worker now, and cannot read half a file.
        unfinished = file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(content))
        unfinished.replace(file)
    except OSError:
        return False
    return True


def _script_frames(trace: TracebackType | None) -> list[str]:
    """Where in the script it was: the frames before the first of ours, without torch's."""
    before = itertools.takewhile(
        lambda frame: _OURS not in frame.filename, traceback.extract_tb(trace)
    )
    return traceback.format_list([each for each in before if _TORCHS not in each.filename])


@dataclass(frozen=True, slots=True)
class LastWords:
    rank: int
    """The worker that wrote it."""
    failed: int
    """The rank whose error it is: a checkpoint's error reaches all ranks."""
    text: str
    """The error, after the lines of the script that led to it."""
    time: float
    follows: bool
    """It is what a worker gets when another one has ended."""
    printed: bool
    """The worker has printed its traceback."""


def read_error_files(error_file: str) -> list[LastWords]:
    """What this worker wrote, and what the others of this machine did, in the order of time.

    A worker may have written its error and not have ended yet when the launcher sees others end.
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
            continue  # torch's own, half written, or the script's
    return sorted(found, key=lambda each: each.time)
