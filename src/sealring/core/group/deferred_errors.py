"""Errors that the script has not seen yet.

Where only a stream waits for a call, the call fails after its caller has gone on. The error is
deferred until something can raise it: the next call, a wait(), backward(), a barrier, and at the
latest destroy_process_group() or the end of the process.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
import weakref
from typing import Final, NoReturn


class DeferredError:
    """Of one group. Once the script has seen the group's error, no other is deferred."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._seen = False
        _of_all_groups.add(self)

    def defer(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None and not self._seen:
                self._error = error

    def clear(self) -> None:
        """The script has seen the group's error, from here or from elsewhere."""
        with self._lock:
            self._seen = True
            self._error = None

    def take(self) -> BaseException | None:
        """The error, if there is one. The caller must raise it."""
        if self._error is None:
            return None
        with self._lock:
            error, self._error = self._error, None
            self._seen = self._seen or error is not None
            return error


_of_all_groups: Final[weakref.WeakSet[DeferredError]] = weakref.WeakSet()
# A forked child has no part in its parent's groups.
os.register_at_fork(after_in_child=_of_all_groups.clear)


def raise_deferred_errors() -> None:
    """Raises the first deferred error of this process's groups."""
    for deferred in list(_of_all_groups):
        if (error := deferred.take()) is not None:
            raise error


def end_process(why: str, error: BaseException) -> NoReturn:
    """For an error that no exception can tell; the other ranks see PeerLost."""
    traceback.print_exception(error)
    print(f"sealring: {why}. The process ends here.", file=sys.stderr, flush=True)
    os._exit(1)
