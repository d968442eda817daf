"""The sockets on which this process makes links just now.

Those who look at its sockets are told of them, and a forked child closes them: a child that
outlives its parent would hold the parent's links open, and no peer would see that the parent has
died. A socket that listens is here until it is closed; one that is connected, until it carries a
link, which takes its descriptor (native/transport/inherited_sockets.hpp).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from typing import Any

from sealring.core.no_fork import NoFork

_lock = threading.Lock()
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def create(family: int) -> socket.socket:
    """A new stream socket."""
    with NoFork():
        return _noted(socket.socket(family, socket.SOCK_STREAM))


def accept(listening: socket.socket) -> tuple[socket.socket, Any]:
    """As `accept` of a socket that does not block."""
    with NoFork():
        sock, address = listening.accept()
        return _noted(sock), address


def _noted(sock: socket.socket) -> socket.socket:
    with _lock:
        _sockets.add(sock)
    return sock


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


def _close_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may hold it
    for each in list(_sockets):
        with contextlib.suppress(OSError):
            os.close(each.detach())  # of a closed one: -1
    _sockets.clear()


os.register_at_fork(after_in_child=_close_in_child)
