"""A group has one error: the first one that ended it, whichever of its halves saw it.

Collectives and messages have links of their own, and may see one disaster at the same moment, each
in its own way. Whoever comes second takes the first one's word, so that a script gets the same
error from every call.
"""

from __future__ import annotations

import threading

from sealring.errors import GroupError


class FirstFailure:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: GroupError | None = None

    def settle(self, error: GroupError) -> GroupError:
        """The error to raise: this one if it is the first or says the same, else the first."""
        with self._lock:
            if self._error is None:
                self._error = error
            return error if _facts(error) == _facts(self._error) else self._error


def _facts(error: GroupError) -> tuple[object, ...]:
    """What stays the same at every later call; the text names the call that met it."""
    return type(error), error.peer, error.collective, error.reported_by
