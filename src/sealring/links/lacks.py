"""What the system denies this process while a group forms, as an error that says what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sealring.errors import ConfigurationError

_NO_THREAD: Final = "can't start new thread"
"""Python says it with a bare RuntimeError."""
_ADVICE: Final = {
    errno.EMFILE: "raise this process's limit of open files (ulimit -n)",
    errno.ENFILE: "raise this machine's limit of open files (sysctl fs.file-max)",
    errno.EAGAIN: "raise this user's limit of processes (ulimit -u), or the container's",
}


@contextmanager
def lack_is_named() -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise _named(problem.errno or 0) from problem
    except RuntimeError as problem:
        if str(problem) != _NO_THREAD:
            raise
        raise _named(errno.EAGAIN) from problem


def _named(number: int) -> ConfigurationError:
    why = _NO_THREAD if number == errno.EAGAIN else os.strerror(number)
    advice = _ADVICE.get(number, "see the cause above")
    return ConfigurationError(f"this worker cannot form a group ({why}): {advice}")
