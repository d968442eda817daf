"""A few threads that compute TLS's handshakes for a listener while there are any."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Final

from sealring.core.links.arrivals import Arrival
from sealring.core.links.threads import borrow
from sealring.errors import MalformedSetup, SealringError

_LOG = logging.getLogger("sealring")

_THREADS: Final = 4

Outcome = bool | SealringError
"""Whether the peer is admitted now, or why it is refused."""


def advanced(one: Arrival) -> Outcome:
    """Go on with the bytes that have come."""
    try:
        assert one.incoming is not None
        return one.incoming.advance()
    except SealringError as error:
        return error
    except Exception as problem:
        # Whatever this is, a stranger may have caused it, so it must not end the job.
        _LOG.exception("sealring: a connection was dropped")
        return MalformedSetup(f"the peer at {one.address} was dropped: {problem!r}")


class TlsThreads:
    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called when there is something in `done`."""
        self._wake = wake
        self._lock = threading.Condition()
        self._due: list[Arrival] = []
        """To be advanced."""
        self._done: queue.SimpleQueue[tuple[Arrival, Outcome]] = queue.SimpleQueue()
        self.working = 0
        """Threads that are borrowed now."""

    def serve(self, one: Arrival) -> Exception | None:
        """The error where there is no thread for it."""
        with self._lock:
            self._due.append(one)
            if self.working == _THREADS:
                return None
            self.working += 1
        try:
            borrow("sealring-accept", self._advance_all)
        except (RuntimeError, MemoryError) as problem:
            with self._lock:
                self.working -= 1
                # A thread that there is takes it, or has taken it.
                if self.working or one not in self._due:
                    return None
                self._due.remove(one)
            return problem
        return None

    def done(self) -> Iterator[tuple[Arrival, Outcome]]:
        while not self._done.empty():
            yield self._done.get()

    def stop(self) -> None:
        with self._lock:
            self._due.clear()
            while self.working:
                self._lock.wait()

    def _advance_all(self) -> None:
        """The newest first: in a flood a worker is served at once, and not after the flood."""
        one: Arrival | None = None
        try:
            while (one := self._newest()) is not None:
                self._done.put((one, advanced(one)))
                one = None
                self._wake()
        except BaseException:  # no memory even to tell of it; `stop` must not wait for ever
            with self._lock:
                if one is not None:
                    self._due.append(one)  # for the next thread
                self._thread_ends()
            raise

    def _newest(self) -> Arrival | None:
        with self._lock:
            if self._due:
                return self._due.pop()
            self._thread_ends()
        return None

    def _thread_ends(self) -> None:
        with self._lock:
            self.working -= 1
            self._lock.notify_all()
