"""The thread that serves all listeners of this process, while there are any.

Each listener has an epoll of its own with its sockets in it, and this thread waits for all of them
by an epoll of those. So a group costs no thread, however long it listens.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from typing import Protocol

_LOG = logging.getLogger("sealring")


class Served(Protocol):
    """A listener, as far as its thread matters to it."""

    def fileno(self) -> int:
        """Readable when there is something to do."""
        ...

    def take_turn(self) -> float | None:
        """Do what there is to do, without waiting; returns when to look again at the latest."""
        ...


class ListeningThread:
    """Every method may be called from any thread but the one that it is about."""

    def __init__(self) -> None:
        self._lock = threading.Condition(threading.Lock())
        self._served: dict[int, Served] = {}
        self._due: dict[int, float] = {}
        """When a listener is to be looked at, whether something comes or not."""
        self._in_turn: int | None = None
        self._thread: threading.Thread | None = None
        self._epoll: select.epoll | None = None
        self._wake = -1

    def add(self, listener: Served) -> None:
        """Serve it. RuntimeError where the thread is to be started and cannot be."""
        with self._lock:
            if self._thread is None:
                self._start()
            assert self._epoll is not None
            self._served[listener.fileno()] = listener
            self._epoll.register(listener.fileno(), select.EPOLLIN)

    def remove(self, listener: Served) -> None:
        """It has no turn any more when this returns, nor the thread if it was the last one."""
        with self._lock:
            key = listener.fileno()
            if self._served.get(key) is not listener:
                return
            assert self._epoll is not None
            del self._served[key]
            self._due.pop(key, None)
            self._epoll.unregister(key)
            while self._in_turn == key:
                self._lock.wait()
            thread = None
            if not self._served:
                thread, self._thread = self._thread, None
                if thread is not None:
                    os.eventfd_write(self._wake, 1)
        if thread is not None:
            thread.join()

    def _start(self) -> None:
        epoll = select.epoll()
        wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        epoll.register(wake, select.EPOLLIN)
        thread = threading.Thread(
            target=self._run, args=(epoll, wake), name="sealring-listen", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            epoll.close()
            os.close(wake)
            raise
        self._thread, self._epoll, self._wake = thread, epoll, wake

    def _run(self, epoll: select.epoll, wake: int) -> None:
        while True:
            ready = {key for key, _ in epoll.poll(self._patience())}
            if wake in ready:
                break
            now = time.monotonic()
            with self._lock:
                ready.update(key for key, due in self._due.items() if due <= now)
            for key in ready:
                self._serve(key)
        epoll.close()
        os.close(wake)

    def _patience(self) -> float:
        with self._lock:
            due = min(self._due.values(), default=None)
        return -1.0 if due is None else max(0.0, due - time.monotonic())

    def _serve(self, key: int) -> None:
        with self._lock:
            if (listener := self._served.get(key)) is None:
                return
            self._in_turn = key
        due: float | None = None
        try:
            due = listener.take_turn()
        except Exception:  # the others must be served all the same
            _LOG.exception("sealring: a listener failed")
        with self._lock:
            self._in_turn = None
            if key not in self._served:
                self._lock.notify_all()  # to the thread that removed it
            elif due is None:
                self._due.pop(key, None)
            else:
                self._due[key] = due


_shared = ListeningThread()


def listening_thread() -> ListeningThread:
    """This process's."""
    return _shared


def _forget() -> None:
    """A forked child has neither the thread nor the listeners."""
    global _shared
    _shared = ListeningThread()


os.register_at_fork(after_in_child=_forget)
