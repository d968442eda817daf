"""Answers on a worker's socket: one question and one answer for each connection.

The socket is made with the process's first group and removed at its end. A question is one line,
`status` or `sockets`. The answer is one line of JSON. The cost of readers is bounded: connections
accepted in a second, open connections, the time of each, and how often an answer is computed. A
reader that does not read is dropped. The thread never waits for a reader. Otherwise it sleeps in
poll(), without Python's lock. The code that makes the answers is imported at the first question.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from sealring.core.hooks import GroupMade, Made
from sealring.core.identity.process import peer_of
from sealring.core.settings import LIVE
from sealring.errors import ConfigurationError
from sealring.observe.directory import SUFFIX, PrivateDirectory, chosen_directory

_LOG = logging.getLogger("sealring")

PER_SECOND: Final = 50
"""The most connections accepted in a second. More wait, or the kernel refuses them."""
MOST_OPEN: Final = 16
SECONDS: Final = 2.0
"""The time limit for a whole connection."""
MOST_QUESTION: Final = 32
_YOUNGEST_S: Final = 0.2
_SHARE: Final = 50
"""An answer is computed at most once in 0.2 s, and takes at most one fiftieth of the time."""
_BACKLOG: Final = 16


class CachedAnswer:
    """An answer that is kept for a time. The more it costs to compute, the longer it is kept."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._answer = b""
        self._good_until = 0.0

    def __call__(self) -> bytes:
        with self._lock:
            began = time.monotonic()
            if began >= self._good_until:
                self._answer = self._make()
                cost = time.monotonic() - began
                self._good_until = began + max(_YOUNGEST_S, _SHARE * cost)
            return self._answer


class _Connection:
    __slots__ = ("deadline", "question", "rest", "socket")

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.deadline = time.monotonic() + SECONDS
        self.question = b""
        self.rest = memoryview(b"")


class StatusServer:
    """A socket in the directory, and the thread that answers on it."""

    def __init__(
        self, directory: PrivateDirectory, answers: Mapping[str, Callable[[], bytes]]
    ) -> None:
        self._directory = directory
        self._answers = {f"{name}\n".encode(): CachedAnswer(each) for name, each in answers.items()}
        self.name = f"{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
        self.path = directory.path / self.name
        self._listener = _listen(directory, self.name)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # poll() keeps no state in the kernel, which a forked child would share.
        self._selector = selectors.PollSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._listening = True
        self._window = (time.monotonic(), 0)
        self._open: dict[int, _Connection] = {}
        self._thread = threading.Thread(target=self._run, name="sealring live", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # the caller closes the directory
            with contextlib.suppress(OSError):
                directory.remove(self.name)
            self._close_own()
            raise

    def connections(self) -> set[int]:
        """The inodes of the readers' sockets. Call it only on the answering thread."""
        return {os.fstat(fd).st_ino for fd in self._open}

    def close(self) -> None:
        """Removes the socket and ends the thread."""
        with contextlib.suppress(OSError):
            self._directory.remove(self.name)
        os.eventfd_write(self._wake, 1)
        self._thread.join(SECONDS)
        self.forget()

    def forget(self) -> None:
        """Closes this process's descriptors, but leaves the socket file to the other process."""
        for connection in self._open.values():
            connection.socket.close()
        self._open.clear()
        self._close_own()
        self._directory.close()

    def _close_own(self) -> None:
        self._listener.close()
        with contextlib.suppress(OSError):
            os.close(self._wake)

    # ---- on the thread

    def _run(self) -> None:
        # Signals are blocked here: Python's handlers run on the main thread, which must wake up.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            for key, _ in self._selector.select(self._patience()):
                if key.fd == self._wake:
                    return
                self._serve(key)
            self._drop_late()
            self._listen_again()

    def _serve(self, key: selectors.SelectorKey) -> None:
        connection = self._open.get(key.fd)
        try:
            if connection is None:
                self._accept()
            elif not self._proceed(connection):
                self._drop(connection)
        except Exception as problem:
            if not isinstance(problem, OSError):
                _LOG.warning("sealring: a status could not be given: %r", problem)
            if connection is not None:
                self._drop(connection)

    def _accept(self) -> None:
        began, count = self._window
        now = time.monotonic()
        self._window = (began, count + 1) if now - began < 1.0 else (now, 1)
        if self._window[1] >= PER_SECOND:
            self._selector.unregister(self._listener)
            self._listening = False
        sock, _ = self._listener.accept()
        try:
            sock.setblocking(False)
            if peer_of(sock).uid not in (0, os.geteuid()):
                raise PermissionError
            if len(self._open) >= MOST_OPEN:
                self._drop(next(iter(self._open.values())))
            connection = _Connection(sock)
            self._selector.register(sock, selectors.EVENT_READ, connection)
            self._open[sock.fileno()] = connection
        except BaseException:
            sock.close()
            raise

    def _proceed(self, connection: _Connection) -> bool:
        """Goes on with a connection. False when it has ended."""
        sock = connection.socket
        if not connection.rest:
            part = sock.recv(MOST_QUESTION)
            connection.question += part
            if not part or len(connection.question) > MOST_QUESTION:
                return False
            if not connection.question.endswith(b"\n"):
                return True
            answer = self._answers.get(connection.question)
            if answer is None:
                return False
            connection.rest = memoryview(answer())
            self._selector.modify(sock, selectors.EVENT_WRITE, connection)
        with contextlib.suppress(BlockingIOError):
            connection.rest = connection.rest[sock.send(connection.rest) :]
        return bool(connection.rest)

    def _drop(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        del self._open[connection.socket.fileno()]
        connection.socket.close()

    def _drop_late(self) -> None:
        now = time.monotonic()
        for connection in [each for each in self._open.values() if each.deadline <= now]:
            self._drop(connection)

    def _listen_again(self) -> None:
        if not self._listening and time.monotonic() - self._window[0] >= 1.0:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._listening = True

    def _patience(self) -> float | None:
        """How long to sleep if no descriptor is ready. None: no limit."""
        moments = [each.deadline for each in self._open.values()]
        if not self._listening:
            moments.append(self._window[0] + 1.0)
        return max(0.0, min(moments) - time.monotonic()) if moments else None


def bounded(answer: bytes) -> bytes:
    from sealring.observe.status import MOST_BYTES

    if len(answer) > MOST_BYTES:
        raise ValueError(f"an answer has {len(answer)} bytes, more than {MOST_BYTES}")
    return answer


def _listen(directory: PrivateDirectory, name: str) -> socket.socket:
    remove_stale(directory)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    # It gets its final name only when it listens. Before, it would be taken for a stale socket.
    unfinished = f".{name}"
    try:
        listener.setblocking(False)
        listener.bind(directory.address(unfinished))
        listener.listen(_BACKLOG)
        directory.rename(unfinished, name)
    except BaseException:
        listener.close()
        with contextlib.suppress(OSError):
            directory.remove(unfinished)
        raise
    return listener


def remove_stale(directory: PrivateDirectory) -> None:
    """Removes the sockets of killed workers. No later worker has the same name."""
    for name in directory.sockets():
        if is_stale(directory, name):
            with contextlib.suppress(OSError):
                directory.remove(name)


def is_stale(directory: PrivateDirectory, name: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(directory.address(name))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


# ---- this process's socket


_LOG = logging.getLogger("sealring")
_lock = threading.Lock()
_server: StatusServer | None = None
_latest: GroupMade | None = None
_tried: Path | None = None


def observe_groups(environ: Mapping[str, str]) -> Made:
    directory = chosen_directory(environ)

    def made(group: GroupMade) -> None:
        if directory is not None:
            show(directory, group)

    return made


def show(directory: Path, group: GroupMade) -> None:
    """Lets this process answer in `directory` from now on. A later call replaces the group."""
    global _latest, _server, _tried
    with _lock:
        _latest = group
        if _tried == directory:
            return
        _tried = directory
        if _server is not None:
            _server.close()
            _server = None
        try:
            _server = _start(PrivateDirectory(directory, create=True))
        except (OSError, RuntimeError, ConfigurationError) as problem:  # RuntimeError: no thread
            _LOG.warning(
                "sealring: `sealring top` will not show this worker: %s. %s=0 switches it off",
                problem, LIVE.name,
            )  # fmt: skip


def _start(directory: PrivateDirectory) -> StatusServer:
    try:
        return StatusServer(directory, {"status": _status, "sockets": _sockets})
    except BaseException:
        directory.close()
        raise


def _status() -> bytes:
    from sealring.observe.gather import worker_status
    from sealring.observe.status import encode

    assert _latest is not None
    return bounded(encode("status", worker_status(_latest)))


def _sockets() -> bytes:
    from sealring.observe.gather import socket_status
    from sealring.observe.status import encode

    assert _latest is not None
    readers = set() if _server is None else _server.connections()
    return bounded(encode("sockets", socket_status(_latest, without=readers)))


def socket_path() -> Path | None:
    """The path of this process's socket. None if it does not answer."""
    return None if _server is None else _server.path


def sweep(environ: Mapping[str, str]) -> None:
    """Removes the sockets of killed workers. For the launcher, when all workers have ended."""
    with contextlib.suppress(OSError, ConfigurationError):
        if (path := chosen_directory(environ)) is not None:
            directory = PrivateDirectory(path)
            try:
                remove_stale(directory)
            finally:
                directory.close()


@atexit.register
def _end() -> None:
    global _server
    with _lock:
        server, _server = _server, None
    if server is not None:
        with contextlib.suppress(OSError):
            server.close()


def _forget() -> None:
    """In a forked child: closes the socket, because the child does not answer for its parent."""
    global _lock, _server, _latest, _tried
    server, _server, _latest, _tried, _lock = _server, None, None, None, threading.Lock()
    if server is not None:
        server.forget()


os.register_at_fork(after_in_child=_forget)
