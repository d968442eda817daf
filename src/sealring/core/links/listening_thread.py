"""The thread that serves all listeners of this process, while there are any.

Each listener has an epoll of its own with its sockets in it, and this thread waits for all of them
by an epoll of those. So a group costs no thread, however long it listens.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from dataclasses import dataclass, field
from typing import Final, Protocol

from sealring.core.links.threads import AtWork

_LOG = logging.getLogger("sealring")

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
        self._serving: _Serving | None = None

    def add(self, listener: Served) -> None:
        """Serve it. RuntimeError where the thread cannot be started, OSError where epoll fails."""
        key = listener.fileno()
        with self._lock:
            serving = self._serving
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
            key, serving = listener.fileno(), self._serving
            if serving is None or serving.served.get(key) is not listener:
                return
            serving.epoll.unregister(key)
            del serving.served[key]
            serving.due.pop(key, None)
            serving.failed.discard(key)
            if not serving.served:
                self._serving = None
                os.eventfd_write(serving.wake, 1)
            while serving.in_turn == key:
                self._lock.wait()
        if not serving.served and serving.thread is not None:
            serving.thread.join()

    def forget(self) -> None:
        """In a forked child, which has neither the thread nor the listeners."""
        if self._serving is not None:
            self._serving.close()

    def _start(self, key: int, first: Served) -> None:
        serving = _Serving(select.epoll(), os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        try:
            serving.epoll.register(serving.wake, select.EPOLLIN)
            serving.epoll.register(key, select.EPOLLIN)
            serving.served[key] = first
            serving.thread = threading.Thread(
                target=self._run, args=(serving,), name="sealring-listen", daemon=True
            )
            self._serving = serving
            serving.thread.start()
        except BaseException:
            # Ctrl-C may have come when the thread had started. It waits for the caller's lock, and
            # then ends, as there is nothing to serve.
            self._serving = None
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


def _forget() -> None:
    global _shared
    _shared.forget()
    _shared = ListeningThread()


os.register_at_fork(after_in_child=_forget)
