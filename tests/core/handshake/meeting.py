"""Two workers in one process, each at its end of a loopback connection."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from sealring.core.handshake import Hello, SecureChannel, Terms, accept, dial
from sealring.core.identity import Credentials

T = TypeVar("T")


def terms(rank: int, **changes: Any) -> Terms:
    agreed: dict[str, Any] = {
        "job": "job",
        "group": "default",
        "epoch": "0.1",
        "world": 4,
        "members": (0, 1, 2, 3),
        "rank": rank,
        "settings": {"record_bytes": 131072},
        "host": f"host-{rank}",
    }
    return Terms(**(agreed | changes))


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def connected() -> tuple[socket.socket, socket.socket]:
    """Makes a TCP connection; returns the end that dialed and the end that accepted."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return near, far


@contextlib.contextmanager
def in_background(call: Callable[[], T]) -> Iterator[list[T | BaseException]]:
    """Runs `call` beside the block; afterwards the list has its result or its exception."""
    outcome: list[T | BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield outcome
    finally:
        thread.join()


@dataclass
class Met:
    dialer: SecureChannel | BaseException
    acceptor: SecureChannel | BaseException

    def channels(self) -> tuple[SecureChannel, SecureChannel]:
        for end in (self.dialer, self.acceptor):
            if isinstance(end, BaseException):
                raise end
        assert isinstance(self.dialer, SecureChannel)
        assert isinstance(self.acceptor, SecureChannel)
        return self.dialer, self.acceptor

    def close(self) -> None:
        for end in (self.dialer, self.acceptor):
            if isinstance(end, SecureChannel):
                end.close(until=time.monotonic())


@contextlib.contextmanager
def meeting(
    dialer: tuple[Credentials, Terms],
    acceptor: tuple[Credentials, Terms],
    *,
    expecting: int | None = None,
    admit: Callable[[Hello], None] | None = None,
) -> Iterator[Met]:
    near, far = connected()
    rank = acceptor[1].rank if expecting is None else expecting
    with in_background(lambda: accept(far, *acceptor, soon(), admit=admit)) as accepted:
        try:
            dialed: SecureChannel | BaseException = dial(near, *dialer, rank, soon())
        except BaseException as error:
            dialed = error
    met = Met(dialed, accepted[0])
    try:
        yield met
    finally:
        met.close()
