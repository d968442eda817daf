"""fork() waits while a thread is in OpenSSL by way of pyOpenSSL, which has a copy of its own.

OpenSSL's tables have locks. One that a thread of the parent held would never be free in the child,
whose first use of `cryptography` would wait for it without end. The native core protects its own
calls in the same way (native/keys/secret_memory.hpp). pyOpenSSL releases the interpreter's lock in
every call and needs it to return. The native core's handler holds that lock while it waits, so it
cannot wait for pyOpenSSL; Python's handler, which runs before it, can.

It also waits while a socket of a link is in no table of those that a child closes.

What a fork need not wait for is made anew in the child: locks of this package's own.
"""

from __future__ import annotations

import os
import threading
from contextlib import ContextDecorator
from typing import Final

_changed = threading.Condition()
inside: Final[dict[int, int]] = {}
"""The threads that are in a block, and how deep."""
forking: Final[set[int]] = set()
"""Threads that fork, or wait for that."""


class NoFork(ContextDecorator):
    """In the block, or in the function, no other thread forks.

    There a thread must not wait for anything but a lock of OpenSSL or of the native core.
    """

    def __enter__(self) -> None:
        thread = threading.get_ident()
        with _changed:
            # A thread that forks may come here too: other handlers of fork(), the garbage collector
            # and signals' handlers run in it. It must not wait for itself.
            while forking and thread not in forking and thread not in inside:
                _changed.wait()
            inside[thread] = inside.get(thread, 0) + 1

    def __exit__(self, *_: object) -> None:
        thread = threading.get_ident()
        with _changed:
            inside[thread] -= 1
            if not inside[thread]:
                del inside[thread]
                if forking:
                    _changed.notify_all()


def _before() -> None:
    # A signal's handler may fork in the middle of a block; it must not wait for itself.
    own = {threading.get_ident()}
    _changed.acquire()
    forking.update(own)
    _changed.wait_for(lambda: inside.keys() <= own)


def _in_parent() -> None:
    forking.discard(threading.get_ident())
    _changed.notify_all()
    _changed.release()


def _in_child() -> None:
    global _changed
    _changed = threading.Condition()
    forking.clear()
    own = threading.get_ident()
    for thread in inside.keys() - {own}:
        del inside[thread]


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


class OwnLock:
    """A lock of a module's, free in a forked child: the thread that held it does not exist there.

    There is one for each module that has one, for as long as the process lives.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()
