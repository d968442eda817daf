"""The sockets on which this process makes links just now, for those who look at its sockets.

A socket that listens is here until it is closed; one that is connected, until it carries a link,
which takes its descriptor.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref

_lock = threading.Lock()
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def note(sock: socket.socket) -> None:
    with _lock:
        _sockets.add(sock)


def inodes() -> list[int]:
    with _lock:
        known = list(_sockets)
    found = []
    for each in known:
        try:
            found.append(os.fstat(each.fileno()).st_ino)
        except OSError:  # closed, or handed over, which makes its descriptor -1
            continue
    return sorted(found)


def _forget() -> None:
    """A forked child makes no link of its parent's."""
    global _lock
    _lock = threading.Lock()
    _sockets.clear()


os.register_at_fork(after_in_child=_forget)
