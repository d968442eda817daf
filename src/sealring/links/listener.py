"""Takes connections from anybody, a bounded number at a time, and gives each a thread.

Strangers reach this code. Each connection is on its own thread with its own deadline, so one that
is silent, slow or endless costs a slot for some seconds and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Final

from sealring.errors import ConfigurationError
from sealring.links.rendezvous import Address

_LOG = logging.getLogger("sealring")

_SLOTS: Final = 64
_BACKLOG: Final = 1024
_PAUSE_SECONDS: Final = 0.1


HandOver = Callable[[], None]
"""What a handler gives back when its socket is to outlive the listener."""


class Listener:
    """Listens from the moment it is made; calls `handle` with each connection after `start`."""

    def __init__(
        self, addresses: Sequence[str], handle: Callable[[socket.socket], HandOver | None]
    ) -> None:
        self._handle = handle
        self._lock = threading.Lock()
        self._cuttable: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._slots = threading.BoundedSemaphore(_SLOTS)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._sockets: list[socket.socket] = []
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            for address in addresses:
                self._sockets.append(_listen(address))
        except BaseException:
            self.stop()
            raise

    @property
    def addresses(self) -> list[Address]:
        return [sock.getsockname()[:2] for sock in self._sockets]

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="sealring-listen", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close everything that `handle` has not yet handed on, and wait for the threads."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            threads = list(self._threads)
            for sock in self._cuttable:
                # Not close(): its thread may be waiting on the descriptor, and this wakes it.
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for sock in self._sockets:
            sock.close()
        os.close(self._wake)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        by_fd = {sock.fileno(): sock for sock in self._sockets}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        while not self._stopping.is_set():
            for fd, _ in poll.poll():
                if fd in by_fd:
                    self._accept(by_fd[fd])

    def _accept(self, listening: socket.socket) -> None:
        # Full: further connections wait in the kernel's queue.
        while not self._slots.acquire(timeout=_PAUSE_SECONDS):
            if self._stopping.is_set():
                return
        try:
            sock, _ = listening.accept()
        except OSError as problem:
            self._slots.release()
            if not isinstance(problem, BlockingIOError | ConnectionAbortedError):
                # Most likely out of descriptors, which handlers will free.
                _LOG.warning("sealring: a connection cannot be taken: %s", problem)
                self._stopping.wait(_PAUSE_SECONDS)
            return
        thread = threading.Thread(
            target=self._serve, args=(sock,), name="sealring-accept", daemon=True
        )
        with self._lock:
            self._cuttable.add(sock)
            self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError as problem:  # no more threads to be had
                self._cuttable.discard(sock)
                self._threads.discard(thread)
                self._slots.release()
                sock.close()
                _LOG.warning("sealring: a connection cannot be served: %s", problem)

    def _serve(self, sock: socket.socket) -> None:
        hand_over = None
        try:
            hand_over = self._handle(sock)
        finally:
            with self._lock:
                self._cuttable.discard(sock)
            # Only now that stop() will not cut it; but stop() still waits for this thread.
            if hand_over is not None:
                hand_over()
            self._slots.release()
            with self._lock:
                self._threads.discard(threading.current_thread())


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((address, 0))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as problem:
        sock.close()
        raise ConfigurationError(
            f"this worker cannot listen on {address} ({problem.strerror}): set SEALRING_ADDRESS or "
            "SEALRING_INTERFACE to an address of this machine"
        ) from problem
    except BaseException:
        sock.close()
        raise
    return sock
