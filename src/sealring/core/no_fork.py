"""Makes fork() wait while a thread is in a state that a child must not inherit.

First, while a thread calls OpenSSL through pyOpenSSL, which has its own copy of OpenSSL. OpenSSL's
tables have locks. A lock that a thread of the parent held would stay locked in the child, whose
first use of `cryptography` would then wait for ever. The native core protects its own calls in the
same way (native/keys/secret_memory.hpp), but its fork handler cannot wait for pyOpenSSL: it holds
the GIL, which pyOpenSSL needs to return. Python's handler runs before it and can wait.

Second, while a link's socket is in no table of the sockets that a child closes.

Locks of this package need no waiting: a child makes them anew (`OwnLock`).
"""

from __future__ import annotations

import os
import threading
from contextlib import ContextDecorator
from typing import Final

_changed = threading.Condition()
inside: Final[dict[int, int]] = {}
"""The threads that are inside NoFork blocks, and how deeply nested."""
forking: Final[set[int]] = set()
"""The threads that fork, or wait to fork."""


class NoFork(ContextDecorator):
    """Prevents other threads from forking during a block, or during a decorated function.

    Inside, a thread may wait only for locks of OpenSSL or of the native core.
    """

    def __enter__(self) -> None:
        thread = threading.get_ident()
        with _changed:
            # A forking thread may come here, too, in another fork handler, in the garbage
            # collector or in a signal handler. It must not wait for itself.
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
    # A signal handler may fork inside a block of its own thread; it must not wait for itself.
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
    """A lock that is free in a forked child, where the thread that held it does not exist.

    For module variables only: it is registered with fork() as long as the process lives.
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
