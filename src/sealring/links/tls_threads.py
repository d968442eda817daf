"""A few threads that compute TLS's handshakes for a listener, from the first connection on."""

from __future__ import annotations

import collections
import logging
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from sealring.errors import MalformedSetup, SealringError
from sealring.links.unproven import Unproven

_LOG = logging.getLogger("sealring")

_THREADS: Final = 4

Outcome = bool | SealringError
"""Whether the peer is admitted now, or why it is refused."""


def advanced(one: Unproven) -> Outcome:
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
        self._due: collections.deque[Unproven] = collections.deque()
        """To be advanced: one for each call that the threads have before them."""
        self._done: queue.SimpleQueue[tuple[Unproven, Outcome]] = queue.SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None
        self._started = False
        """At least one of them runs."""

    def serve(self, one: Unproven) -> RuntimeError | None:
        """The error where no thread can be started for it, and there is none."""
        self._due.append(one)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, "sealring-accept")
        try:
            self._threads.submit(self._advance_newest)
        except RuntimeError as problem:
            # The call is queued all the same: a thread that there is takes it.
            if self._started:
                return None
            self._due.remove(one)
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
            return problem
        self._started = True
        return None

    def done(self) -> Iterator[tuple[Unproven, Outcome]]:
        while not self._done.empty():
            yield self._done.get()

    def stop(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()

    def _advance_newest(self) -> None:
        """The newest first: in a flood a worker is served at once, and not after the flood."""
        one = self._due.pop()
        self._done.put((one, advanced(one)))
        self._wake()
