"""Errors that nobody has been told of yet.

Where only a stream waits for a call, its failure comes when the caller has gone on. It is owed to
the script until something raises it: the next call, a wait(), backward(), a barrier, and at the
latest destroy_process_group() or the process's end.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
import weakref
from typing import Final, NoReturn


class OwedError:
    """One group's. Once the script has seen the group's error, it is not owed again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._told = False
        _of_all_groups.add(self)

    def owe(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None and not self._told:
                self._error = error

    def told(self) -> None:
        """The script has the group's error, from here or from elsewhere."""
        with self._lock:
            self._told = True
            self._error = None

    def collect(self) -> BaseException | None:
        """What is owed; whoever takes it raises it."""
        with self._lock:
            error, self._error = self._error, None
            self._told = self._told or error is not None
            return error


_of_all_groups: Final[weakref.WeakSet[OwedError]] = weakref.WeakSet()
# A forked child has no part in its parent's groups.
os.register_at_fork(after_in_child=_of_all_groups.clear)


def raise_what_is_owed() -> None:
    """By any group of this process."""
    for owed in list(_of_all_groups):
        if (error := owed.collect()) is not None:
            raise error


def end_process(why: str, error: BaseException) -> NoReturn:
    """Where nobody can be told by an exception; the other ranks see PeerLost."""
    traceback.print_exception(error)
    print(f"sealring: {why}. The process ends here.", file=sys.stderr, flush=True)
    os._exit(1)
