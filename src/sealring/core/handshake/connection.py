"""A connection for set-up messages: a socket with a deadline, a peer's certificate, an exporter.

Two kinds exist: a TLS 1.3 connection (tls.py), and a connection under the keys of a session that an
earlier TLS connection made (resumption.py).
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Final

from cryptography import x509

from sealring import _native
from sealring.errors import MalformedSetup, PeerUnreachable
from sealring.limits import MAX_SETUP_BYTES

LINGER_SECONDS: Final = 1.0
_LINGER_BYTES: Final = 64 << 10
_ROOM_BYTES: Final = 64 << 10
"""The buffer for a message whose bytes have not come yet."""


class Connection(ABC):
    """Set-up messages over a non-blocking socket. Blocking calls raise at the deadline."""

    def __init__(self, sock: socket.socket, who: str, deadline: float) -> None:
        self.who = who
        """The peer's name in errors: its address, and its rank as soon as that is known."""
        self.deadline = deadline
        self.admitted_rank: int | None = None
        """The peer's rank, once its certificate is verified and passes the policy; before, None."""
        self.established = False
        self.muted = False
        """Whether no refusal may be sent any more."""
        self._announced: int | None = None
        """The length of the message that is being received, once it is known."""
        self.half_sent = False
        """Whether the peer has got part of a message and takes no more now. Nothing else may be
        sent."""
        self._socket = sock
        self._address: str | None = None
        self._received = bytearray()
        self._at = 0
        """How many bytes of `_received` have come; the rest is room."""
        never_block(sock)

    @property
    def address(self) -> str:
        """The peer's address, for people to read."""
        if self._address is None:
            self._address = address_of(self._socket)
        return self._address

    @abstractmethod
    def handshake(self) -> x509.Certificate:
        """Does the mutual handshake, and returns the certificate that the peer has proved."""

    @abstractmethod
    def advance(self) -> x509.Certificate | None:
        """Goes on with the acceptor's handshake without waiting; None while bytes are missing."""

    @property
    @abstractmethod
    def own_fingerprint(self) -> bytes:
        """SHA-256 of the certificate with which this worker proved itself."""

    @abstractmethod
    def check_negotiated(self) -> None:
        """Raises PeerIncompatible if the handshake agreed on something that is not allowed."""

    @abstractmethod
    def _sending(self, data: bytes | bytearray) -> Generator[None, None, None]:
        """Sends the data; yields while the peer takes no more."""

    def sending(self, data: bytes | bytearray) -> Generator[None, None, None]:
        """Sends the data; yields while the peer takes no more, and `wait` waits until it does."""
        for _ in self._sending(data):
            self.half_sent = True
            yield
            self.half_sent = False

    def send(self, data: bytes | bytearray) -> None:
        for _ in self.sending(data):
            self.wait()

    @abstractmethod
    def receive_some(self, into: memoryview) -> int:
        """Takes as many bytes as have come and fit, and returns how many. It does not wait."""

    def receive(self, count: int) -> bytearray:
        """Waits for exactly `count` bytes. The caller overwrites them if they are secret."""
        while (received := self.receive_now(count)) is None:
            self.wait()
        return received

    def receive_now(self, count: int) -> bytearray | None:
        """Like `receive`, without waiting: None while bytes are missing; the next call goes on.

        The buffer grows as bytes come, not when a peer announces them. Bytes that have come are
        read even after the deadline, as they may say why the peer ends. The deadline also counts if
        the peer sends so steadily that this never has to wait.
        """
        try:
            while self._at < count:
                if self._at == len(self._received):
                    larger = bytearray(min(count, max(2 * self._at, _ROOM_BYTES)))
                    larger[: self._at] = self._received
                    _native.erase(self._received)
                    self._received = larger
                with memoryview(self._received) as view, view[self._at :] as rest:
                    some = self.receive_some(rest)
                if not some:
                    return None
                self._at += some
                if self._at < count and time.monotonic() >= self.deadline:
                    raise self._too_late()
        except BaseException:
            _native.erase(self._received)
            raise
        received, self._received, self._at = self._received, bytearray(), 0
        return received

    def message_now(self, most: int = MAX_SETUP_BYTES) -> bytearray | None:
        """The peer's next message; None while some of it is missing."""
        if self._announced is None:
            if (head := self.receive_now(4)) is None:
                return None
            self._announced = self._allowed(int.from_bytes(head, "big"), most)
        if (message := self.receive_now(self._announced)) is not None:
            self._announced = None
        return message

    def _allowed(self, length: int, most: int) -> int:
        """Checks a message's length before any of it is read. Raises MalformedSetup."""
        if length > most:
            raise MalformedSetup(f"{self.who} announced a set-up message of {length} bytes")
        return length

    def wait(self) -> None:
        """Waits until the peer has sent something or, while `half_sent`, takes more."""
        self._wait(select.POLLOUT if self.half_sent else select.POLLIN)

    @abstractmethod
    def export(self, label: bytes, length: int, context: bytes) -> _native.Secret:
        """A secret that only the two ends of this connection can derive."""

    @abstractmethod
    def _drop(self) -> None:
        """Overwrites and frees the connection's secrets."""

    def detach(self) -> socket.socket:
        """Returns the socket and sends the peer nothing: records come next on it."""
        self.forget()
        return self._socket

    @property
    def socket(self) -> socket.socket:
        return self._socket

    def close(self, until: float | None = None) -> None:
        """Closes so that the peer can still read what was sent last.

        If a socket is closed with unread bytes in it, it sends a reset, which destroys a refusal or
        an alert that the peer has not read yet. So this ends our direction first, and then reads on
        for a short while.
        """
        end = time.monotonic() + LINGER_SECONDS if until is None else until
        budget = _LINGER_BYTES
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            while budget > 0 and is_ready(self._socket, select.POLLIN, end):
                chunk = self._socket.recv(min(budget, 16 << 10))
                if not chunk:
                    break
                budget -= len(chunk)
        self._socket.close()
        self.forget()

    def forget(self) -> None:
        """Overwrites what was received, and all secrets. The socket stays open."""
        _native.erase(self._received)
        self._drop()

    def _wait(self, event: int) -> None:
        if not is_ready(self._socket, event, self.deadline):
            raise self._too_late()

    def _too_late(self) -> PeerUnreachable:
        return PeerUnreachable(f"{self.who} did not finish the set-up in time")


def never_block(sock: socket.socket) -> None:
    if sock.gettimeout() != 0.0:  # setting it again would be a system call
        sock.setblocking(False)


def address_of(sock: socket.socket) -> str:
    try:
        name = sock.getpeername()
    except OSError:
        return "an address already gone"
    if not isinstance(name, tuple):
        return "a local socket"
    host, port = name[0], name[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_ready(sock: socket.socket, event: int, deadline: float) -> bool:
    """Waits for an event until the deadline. Returns whether it came."""
    poll = select.poll()
    poll.register(sock, event)
    remaining = deadline - time.monotonic()
    return remaining > 0 and bool(poll.poll(remaining * 1000))
