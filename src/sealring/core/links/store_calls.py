"""Calls of the rendezvous store that end in time, whether it answers or not.

torch's clients wait without end for a server that takes a request and answers nothing: one whose
process is stopped, or that an adversary runs. So a thread of its own waits, and is left behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from sealring.core.links.threads import Job, borrow

T = TypeVar("T")

_LEAST_SECONDS: Final = 1.0
"""How long a call may take that is made at the deadline, or after it."""
_LAST_SECONDS: Final = 2.0
"""How long `end` waits for a call that is under way."""


class StoreCalls:
    """One at a time, for a store is one connection. Methods may be called from any thread."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._changed = threading.Condition()
        self._busy = False
        self._ended = False
        self._given_up = False
        """A call was not answered in time, or is not waited for any more."""

    def make(self, call: Callable[[], T], beyond: float = 0.0) -> T:
        """What it returns or raises; TimeoutError if the store does not answer in time.

        A call that looks at the deadline itself may take so many seconds `beyond` it.
        """
        results: list[T] = []
        problems: list[BaseException] = []

        def run() -> None:
            try:
                results.append(call())
            except BaseException as problem:
                problems.append(problem)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

        with self._changed:
            self._wait_for(lambda: not self._busy)
            if self._ended:
                raise TimeoutError("it is no longer asked")
            self._busy = True
        job: Job | None = None
        try:
            job = borrow("sealring-store", run)
        except RuntimeError:  # no thread can be started: better without a bound than not at all
            run()
        with self._changed:
            self._wait_for(lambda: results or problems, beyond)
        if job is not None:
            job.join()  # its thread serves the next call
        if problems:
            raise problems.pop()
        return results[0]

    def end(self) -> None:
        """No further call is made. One that is under way is left behind after a moment."""
        with self._changed:
            self._ended = True
            left = max(0.0, self._deadline - time.monotonic())
            self._changed.wait_for(lambda: not self._busy, min(left, _LAST_SECONDS))
            self._give_up()

    def _wait_for(self, condition: Callable[[], object], beyond: float = 0.0) -> None:
        left = max(_LEAST_SECONDS, self._deadline + beyond - time.monotonic())
        self._changed.wait_for(lambda: condition() or self._given_up, left)
        if not condition():
            self._give_up()
            raise TimeoutError("it does not answer")

    def _give_up(self) -> None:
        self._given_up = True
        self._changed.notify_all()
