"""Threads of set-up: those that it borrows for a while, and the one that serves all listeners.

A borrowed thread that has nothing to do waits for the next borrower.

Starting a thread takes as long as a link under a session does, and a program that makes one group
after the other would start several for each.

Each listener has an epoll of its own with its sockets in it, and one thread waits for all of them
by an epoll of those. So a group costs no thread, however long it listens.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

from sealring.core.links.arrivals import Arrival
from sealring.errors import MalformedSetup, SealringError

_LOG = logging.getLogger("sealring")

IDLE_NAME: Final = "sealring-idle"
_IDLE_SECONDS: Final = 20.0
"""After so long without a borrower a thread ends."""

_lock = threading.Lock()
idle: Final[list[_Lent]] = []
"""The last one is the one that was given back last: what it needs is still in the caches."""
at_work: Final[set[object]] = set()
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
        lent = idle.pop() if idle else None
    try:
        at_work.add(job)
        if lent is not None:
            lent.jobs.put(job)
        else:
            _Lent(job).start()
    except BaseException:
        at_work.discard(job)
        if lent is not None:
            with _lock:
                idle.append(lent)
        raise
    return job


class AtWork:
    """In the block, this thread sets something up."""

    def __enter__(self) -> None:
        at_work.add(self)

    def __exit__(self, *_: object) -> None:
        at_work.discard(self)


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
                idle.append(self)
            at_work.discard(job)
            job.end()
            del job

    def _next(self) -> Job | None:
        try:
            return self.jobs.get(timeout=_IDLE_SECONDS)
        except queue.Empty:
            with _lock:
                if self in idle:
                    idle.remove(self)
                    return None
        return self.jobs.get()  # it was borrowed at that moment


def _forget() -> None:
    """A forked child has none of these threads, nor any other of its parent's.

    What they were in the middle of using is never whole there: a TLS handshake, a generator that
    runs. To free it would crash the child, so its garbage collection passes over all that there is.
    """
    global _lock
    if at_work:
        gc.freeze()
    _lock = threading.Lock()
    at_work.clear()
    idle.clear()


os.register_at_fork(after_in_child=_forget)


_FAILED_SECONDS: Final = 0.25
"""How long a listener whose turn has failed waits for its next one, and the thread after a failure
of its own: for memory, most likely."""


class Served(Protocol):
    """A listener, as far as its thread matters to it."""

    def fileno(self) -> int:
        """Readable when there is something to do."""
        ...

    def take_turn(self) -> float | None:
        """Do what there is to do, without waiting; returns when to look again at the latest."""
        ...


@dataclass(eq=False, slots=True)
class _Serving:
    """What one thread serves. When nothing is left of it the thread ends; the next has its own."""

    epoll: select.epoll
    wake: int
    """Readable when the thread is to end."""
    served: dict[int, Served] = field(default_factory=dict)
    due: dict[int, float] = field(default_factory=dict)
    """When a listener is to be looked at, whether something comes or not."""
    failed: set[int] = field(default_factory=set)
    """Those that are looked at only when that is due."""
    in_turn: int | None = None
    thread: threading.Thread | None = None
    failures: int = 0
    """Of turns, and of the thread itself."""

    def close(self) -> None:
        """May be called again."""
        self.epoll.close()
        wake, self.wake = self.wake, -1
        if wake >= 0:
            os.close(wake)


class ListeningThread:
    """Every method may be called from any thread but the one that it is about."""

    def __init__(self) -> None:
        self._lock = threading.Condition(threading.Lock())
        self.serving: _Serving | None = None

    def add(self, listener: Served) -> None:
        """Serve it. RuntimeError where the thread cannot be started, OSError where epoll fails."""
        key = listener.fileno()
        with self._lock:
            serving = self.serving
            if serving is not None:
                serving.served[key] = listener
                try:
                    serving.epoll.register(key, select.EPOLLIN)
                except BaseException:
                    del serving.served[key]
                    raise
            else:
                self._start(key, listener)

    def remove(self, listener: Served) -> None:
        """It has no turn any more when this returns, nor the thread if it was the last one."""
        with self._lock:
            key, serving = listener.fileno(), self.serving
            if serving is None or serving.served.get(key) is not listener:
                return
            serving.epoll.unregister(key)
            del serving.served[key]
            serving.due.pop(key, None)
            serving.failed.discard(key)
            if not serving.served:
                self.serving = None
                os.eventfd_write(serving.wake, 1)
            while serving.in_turn == key:
                self._lock.wait()
        if not serving.served and serving.thread is not None:
            serving.thread.join()

    def forget(self) -> None:
        """In a forked child, which has neither the thread nor the listeners."""
        if self.serving is not None:
            self.serving.close()

    def _start(self, key: int, first: Served) -> None:
        serving = _Serving(select.epoll(), os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        try:
            serving.epoll.register(serving.wake, select.EPOLLIN)
            serving.epoll.register(key, select.EPOLLIN)
            serving.served[key] = first
            serving.thread = threading.Thread(
                target=self._run, args=(serving,), name="sealring-listen", daemon=True
            )
            self.serving = serving
            serving.thread.start()
        except BaseException:
            # Ctrl-C may have come when the thread had started. It waits for the caller's lock, and
            # then ends, as there is nothing to serve.
            self.serving = None
            serving.served.clear()
            serving.close()
            raise

    def _run(self, serving: _Serving) -> None:
        """Until the last listener is removed: all groups of the process would wait for another."""
        while True:
            try:
                if not self._has_listeners(serving):
                    break
                self._look(serving)
            except BaseException:
                # What has come is still to be read, and is seen again.
                try:
                    time.sleep(_FAILED_SECONDS)
                    _log_failure(serving, "sealring: the thread that serves all listeners failed")
                except BaseException:  # noqa: S110  (no memory to say so)
                    pass
        serving.close()

    def _has_listeners(self, serving: _Serving) -> bool:
        with self._lock:  # `remove` writes to the eventfd, which is closed after this
            if serving.in_turn is not None:  # its end failed; `remove` may wait for it
                serving.in_turn = None
                self._lock.notify_all()
            return bool(serving.served)

    def _look(self, serving: _Serving) -> None:
        """Wait until something has come or is due, and serve those that it is for."""
        ready = {key for key, _ in serving.epoll.poll(self._patience(serving))}
        now = time.monotonic()
        with self._lock:
            ready.update(key for key, due in serving.due.items() if due <= now)
        for key in ready:
            self._serve(serving, key)

    def _patience(self, serving: _Serving) -> float:
        with self._lock:
            due = min(serving.due.values(), default=None)
        return -1.0 if due is None else max(0.0, due - time.monotonic())

    def _serve(self, serving: _Serving, key: int) -> None:
        with self._lock:
            if (listener := serving.served.get(key)) is None:
                return
            serving.in_turn = key
        due: float | None = None
        failed = True
        try:
            with AtWork():
                due = listener.take_turn()
            failed = False
        except BaseException:  # the others must be served all the same
            due = time.monotonic() + _FAILED_SECONDS
            _log_failure(serving, "sealring: a listener failed")
        finally:
            with self._lock:
                self._turn_is_over(serving, key, due, failed=failed)

    def _turn_is_over(
        self, serving: _Serving, key: int, due: float | None, *, failed: bool
    ) -> None:
        serving.in_turn = None
        if key not in serving.served:
            self._lock.notify_all()  # to the thread that removed it
            return
        if failed:
            serving.due[key] = due or 0.0
        elif due is None:
            serving.due.pop(key, None)
        else:
            serving.due[key] = due
        if failed is not (key in serving.failed):
            # What it failed to do may still be there to do: it would fail without a pause.
            serving.epoll.modify(key, 0 if failed else select.EPOLLIN)
            serving.failed ^= {key}


def _log_failure(serving: _Serving, what: str) -> None:
    """Ever fewer of them; and where memory lacks for a line of the log, there is none."""
    serving.failures += 1
    if serving.failures.bit_count() == 1:
        with contextlib.suppress(Exception):
            _LOG.exception(what)


_shared = ListeningThread()


def listening_thread() -> ListeningThread:
    """This process's."""
    return _shared


def _forget_listeners() -> None:
    global _shared
    _shared.forget()
    _shared = ListeningThread()


os.register_at_fork(after_in_child=_forget_listeners)


# ---- a few threads that compute TLS's handshakes for a listener while there are any

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
