"""Deferred errors: errors of failed calls that the script has not seen yet.

If only a stream waits for a call, the call may fail when its caller has already gone on. The error
is then deferred until something can raise it: the next call, a wait(), backward(), a barrier, and
at the latest destroy_process_group() or the end of the process.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
import weakref
from typing import Final, NoReturn


class DeferredError:
    """A group's deferred error. Once the script has seen the group's error, none is deferred."""

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
        """Notes that the script has seen the group's error, here or elsewhere."""
        with self._lock:
            self._seen = True
            self._error = None

    def take(self) -> BaseException | None:
        """Returns and forgets the deferred error, if there is one. The caller must raise it."""
        if self._error is None:
            return None
        with self._lock:
            error, self._error = self._error, None
            self._seen = self._seen or error is not None
            return error


_of_all_groups: Final[weakref.WeakSet[DeferredError]] = weakref.WeakSet()
# A forked child is not a member of its parent's groups.
os.register_at_fork(after_in_child=_of_all_groups.clear)


def raise_deferred_errors() -> None:
    """Raises the first deferred error of this process's groups."""
    for deferred in list(_of_all_groups):
        if (error := deferred.take()) is not None:
            raise error


def end_process(why: str, error: BaseException) -> NoReturn:
    """Prints an error that cannot be raised any more, and ends the process with exit code 1.

    The other ranks see PeerLost.
    """
    traceback.print_exception(error)
    print(f"sealring: {why}. The process ends here.", file=sys.stderr, flush=True)
    os._exit(1)
