"""What set-up messages travel through: a socket with a deadline, a peer's certificate, an exporter.

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
"""For a message whose bytes have not come yet."""


class Connection(ABC):
    """Blocking calls over a non-blocking socket; each ends by the deadline or raises."""

    def __init__(self, sock: socket.socket, who: str, deadline: float) -> None:
        self.who = who
        """The peer in errors: its address, and its rank from the moment it is known."""
        self.deadline = deadline
        self.admitted_rank: int | None = None
        """Set once the certificate that `handshake` returned is verified and passes the policy."""
        self.established = False
        self.muted = False
        """No refusal is sent any more."""
        self._announced: int | None = None
        """The length of the message that is being received, once it is known."""
        self.half_sent = False
        """The peer has some of a message and takes no more now. Nothing else may be sent."""
        self._socket = sock
        self._address: str | None = None
        self._received = bytearray()
        self._at = 0
        """How much of it has come."""
        never_block(sock)

    @property
    def address(self) -> str:
        """The peer's, for people to read."""
        if self._address is None:
            self._address = address_of(self._socket)
        return self._address

    @abstractmethod
    def handshake(self) -> x509.Certificate:
        """Prove this worker and have the peer prove itself; returns the peer's certificate."""

    @abstractmethod
    def advance(self) -> x509.Certificate | None:
        """The acceptor's handshake without waiting; None while bytes of the peer are missing."""

    @property
    @abstractmethod
    def own_fingerprint(self) -> bytes:
        """SHA-256 of the certificate with which this worker proved itself."""

    @abstractmethod
    def check_negotiated(self) -> None:
        """Refuse what the handshake would have agreed to and we do not."""

    @abstractmethod
    def _sending(self, data: bytes | bytearray) -> Generator[None, None, None]:
        """Sends it; yields while the peer takes no more."""

    def sending(self, data: bytes | bytearray) -> Generator[None, None, None]:
        """The same. `wait` says when to go on."""
        for _ in self._sending(data):
            self.half_sent = True
            yield
            self.half_sent = False

    def send(self, data: bytes | bytearray) -> None:
        for _ in self.sending(data):
            self.wait()

    @abstractmethod
    def receive_some(self, into: memoryview) -> int:
        """As many bytes as have come and as fit; returns how many. Does not wait."""

    def receive(self, count: int) -> bytearray:
        """Exactly `count` bytes, for the caller to overwrite if they are secret."""
        while (received := self.receive_now(count)) is None:
            self.wait()
        return received

    def receive_now(self, count: int) -> bytearray | None:
        """The same without waiting; None while some are missing, which the next call goes on with.

        Room is made as they come, and not when a peer has announced them. What has come already is
        read at the deadline too: it may be why the peer ends. For more the deadline counts also
        where the peer never lets us wait.
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
        """Before a byte of the message is read, or room is made for it."""
        if length > most:
            raise MalformedSetup(f"{self.who} announced a set-up message of {length} bytes")
        return length

    def wait(self) -> None:
        """Until the peer has sent something or, while something is sent to it, takes more."""
        self._wait(select.POLLOUT if self.half_sent else select.POLLIN)

    @abstractmethod
    def export(self, label: bytes, length: int, context: bytes) -> _native.Secret:
        """A secret that both ends of this connection derive alike, and no one else."""

    @abstractmethod
    def _drop(self) -> None:
        """Overwrite and free the connection's secrets."""

    def detach(self) -> socket.socket:
        """The socket, without a word to the peer: nothing may precede the records."""
        self.forget()
        return self._socket

    @property
    def socket(self) -> socket.socket:
        return self._socket

    def close(self, until: float | None = None) -> None:
        """Close so that the peer can still read what was sent last.

        A socket closed with unread bytes in it sends a reset, which destroys a refusal or an alert
        that the peer has not read yet. So: end our direction, then read on for a short while.
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
        """Overwrite what was received, and all secrets. The socket stays open."""
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
    """Wait for it until the deadline."""
    poll = select.poll()
    poll.register(sock, event)
    remaining = deadline - time.monotonic()
    return remaining > 0 and bool(poll.poll(remaining * 1000))
