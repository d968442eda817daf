"""The groups that this process is making just now, for those who look at its sockets."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from sealring.links.listener import Listener

_lock = threading.Lock()
_listeners: list[Listener] = []


@contextlib.contextmanager
def noted(listener: Listener) -> Iterator[None]:
    with _lock:
        _listeners.append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)


def groups_forming() -> tuple[int, list[int]]:
    """How many, and the inodes of the sockets on which they take TLS connections."""
    with _lock:
        known = list(_listeners)
    inodes = []
    for descriptor in (fd for each in known for fd in each.descriptors):
        with contextlib.suppress(OSError):  # closed since
            inodes.append(os.fstat(descriptor).st_ino)
    return len(known), inodes


def _forget() -> None:
    global _lock
    _lock = threading.Lock()
    _listeners.clear()


os.register_at_fork(after_in_child=_forget)
