"""Threads for connections whose peer is admitted: one for each, until it is settled."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from sealring.handshake.peers import Incoming

_LOG = logging.getLogger("sealring")

_THREADS: Final = 64

HandOver = Callable[[], None]
"""What a handler gives back when its socket is to outlive the listener."""


class AdmittedWorkers:
    def __init__(self, handle: Callable[[Incoming], HandOver | None]) -> None:
        self._handle = handle
        self._lock = threading.Lock()
        self._cuttable: set[socket.socket] = set()
        self._threads = ThreadPoolExecutor(_THREADS, "sealring-worker")

    def serve(self, incoming: Incoming, sock: socket.socket) -> None:
        with self._lock:
            self._cuttable.add(sock)
        try:
            self._threads.submit(self._work, incoming, sock)
        except RuntimeError as problem:
            with self._lock:
                self._cuttable.discard(sock)
            sock.close()
            _LOG.warning("sealring: a worker's connection cannot be served: %s", problem)

    def stop(self) -> None:
        """Cut what has not been handed over, and wait for the threads."""
        with self._lock:
            for sock in self._cuttable:
                # Not close(): its thread may be waiting on the descriptor, and this wakes it.
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        self._threads.shutdown()

    def _work(self, incoming: Incoming, sock: socket.socket) -> None:
        hand_over = None
        try:
            try:
                hand_over = self._handle(incoming)
            finally:
                with self._lock:
                    self._cuttable.discard(sock)
            # Only now that stop() will not cut it; but stop() still waits for this thread.
            if hand_over is not None:
                hand_over()
        except Exception:  # the pool keeps it where nothing reads it
            _LOG.exception("sealring: a worker's connection was not served to its end")
