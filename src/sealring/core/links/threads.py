"""Threads that set-up borrows for a while. One that has nothing to do waits for the next borrower.

Starting a thread takes as long as a link under a session does, and a program that makes one group
after the other would start several for each.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Final

_LOG = logging.getLogger("sealring")

IDLE_NAME: Final = "sealring-idle"
_IDLE_SECONDS: Final = 20.0
"""After so long without a borrower a thread ends."""

_lock = threading.Lock()
_idle: Final[list[_Lent]] = []
"""The last one is the one that was given back last: what it needs is still in the caches."""
_at_work: Final[set[object]] = set()
"""What is under way: jobs on borrowed threads, and set-up on others."""


class Job:
    """A call on a borrowed thread."""

    __slots__ = ("_call", "_ended", "name")

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self.name = name
        self._call: Callable[[], None] | None = call
        self._ended = threading.Lock()
        self._ended.acquire()

    def join(self) -> None:
        """Wait until the call has returned, and its thread can be borrowed again."""
        with self._ended:
            pass

    def run(self) -> None:
        call, self._call = self._call, None  # a thread that waits refers to no group
        try:
            assert call is not None
            call()
        except BaseException:  # who waits for the end of the call must not wait for ever
            with contextlib.suppress(Exception):  # no memory for a line of the log, for one
                _LOG.exception("sealring: %s ended", self.name)

    def end(self) -> None:
        self._ended.release()


def borrow(name: str, call: Callable[[], None]) -> Job:
    """Run `call` on a thread of that name. RuntimeError where one must be started and cannot be."""
    job = Job(name, call)
    with _lock:
        lent = _idle.pop() if _idle else None
    try:
        _at_work.add(job)
        if lent is not None:
            lent.jobs.put(job)
        else:
            _Lent(job).start()
    except BaseException:
        _at_work.discard(job)
        if lent is not None:
            with _lock:
                _idle.append(lent)
        raise
    return job


class AtWork:
    """In the block, this thread sets something up."""

    def __enter__(self) -> None:
        _at_work.add(self)

    def __exit__(self, *_: object) -> None:
        _at_work.discard(self)


class _Lent(threading.Thread):
    def __init__(self, first: Job) -> None:
        super().__init__(name=first.name, daemon=True)
        self.jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.jobs.put(first)

    def run(self) -> None:
        while (job := self._next()) is not None:
            self.name = job.name
            job.run()
            self.name = IDLE_NAME
            with _lock:
                _idle.append(self)
            _at_work.discard(job)
            job.end()
            del job

    def _next(self) -> Job | None:
        try:
            return self.jobs.get(timeout=_IDLE_SECONDS)
        except queue.Empty:
            with _lock:
                if self in _idle:
                    _idle.remove(self)
                    return None
        return self.jobs.get()  # it was borrowed at that moment


def _forget() -> None:
    """A forked child has none of these threads, nor any other of its parent's.

    What they were in the middle of using is never whole there: a TLS handshake, a generator that
    runs. To free it would crash the child, so its garbage collection passes over all that there is.
    """
    global _lock
    if _at_work:
        gc.freeze()
    _lock = threading.Lock()
    _at_work.clear()
    _idle.clear()


os.register_at_fork(after_in_child=_forget)
