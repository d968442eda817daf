"""Connections whose first bytes say who made them, read side by side.

A stranger that connects and says nothing, or little, holds up no other connection.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterable, Iterator

from sealring.core.links import setting_up


class Callers:
    """Of listeners that do not block. The caller closes it."""

    def __init__(self, listeners: Iterable[socket.socket], size: int, most: int) -> None:
        """A greeting has `size` bytes. Of more than `most` connections the oldest is dropped."""
        self._size, self._most = size, most
        self._listeners = {each.fileno(): each for each in listeners}
        self._waiting: dict[int, tuple[socket.socket, bytearray]] = {}
        self._poll = select.poll()  # a process may have more descriptors than select() takes
        for descriptor in self._listeners:
            self._poll.register(descriptor, select.POLLIN)

    def greeted(self, deadline: float) -> Iterator[tuple[socket.socket, bytes]]:
        """Waits until something comes; gives the connections whose greeting is whole by then."""
        left = max(0.0, deadline - time.monotonic())
        for descriptor, _ in self._poll.poll(left * 1e3):
            if (listener := self._listeners.get(descriptor)) is not None:
                self._admit(listener)
            elif descriptor in self._waiting and (greeting := self._read(descriptor)) is not None:
                yield self._let_go(descriptor), greeting

    def _admit(self, listener: socket.socket) -> None:
        try:
            sock, _ = setting_up.accept(listener)
        except (BlockingIOError, ConnectionAbortedError):
            return
        sock.setblocking(False)
        if len(self._waiting) >= self._most:
            self._let_go(next(iter(self._waiting))).close()
        self._waiting[sock.fileno()] = sock, bytearray()
        self._poll.register(sock, select.POLLIN)

    def _read(self, descriptor: int) -> bytes | None:
        sock, greeting = self._waiting[descriptor]
        try:
            part = sock.recv(self._size - len(greeting))
        except BlockingIOError:
            return None
        except OSError:
            part = b""
        greeting += part
        if not part:
            self._let_go(descriptor).close()
        return bytes(greeting) if len(greeting) == self._size else None

    def _let_go(self, descriptor: int) -> socket.socket:
        self._poll.unregister(descriptor)
        return self._waiting.pop(descriptor)[0]

    def close(self) -> None:
        for sock, _ in self._waiting.values():
            sock.close()
        self._waiting.clear()
