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
    errno.ENOMEM: "free memory on this machine, or raise the container's limit",
    errno.ENOBUFS: "free memory on this machine, or raise the container's limit",
}
"""By what is lacking. Any other OSError is left as it is: a store may have raised it."""


@contextmanager
def lack_is_named() -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        if problem.errno not in _ADVICE:
            raise
        raise _named(problem.errno) from problem
    except RuntimeError as problem:
        if str(problem) != _NO_THREAD:
            raise
        raise _named(errno.EAGAIN) from problem


def _named(number: int) -> ConfigurationError:
    why = _NO_THREAD if number == errno.EAGAIN else os.strerror(number)
    return ConfigurationError(f"this worker cannot form a group ({why}): {_ADVICE[number]}")
