"""The channel between two verified workers, for set-up messages only.

Wherever a message is due, a refusal may come instead. Both sides then raise the same error.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from sealring import _native
from sealring.core.handshake.connection import LINGER_SECONDS, Connection
from sealring.core.handshake.messages import Hello, Message, encode_message, parse_message
from sealring.core.handshake.refusals import error_of, refusal_of
from sealring.core.handshake.terms import Terms, link_context
from sealring.core.identity.kept_key import Erased
from sealring.core.identity.verification import VerifiedPeer
from sealring.errors import HandshakeError, SealringError
from sealring.limits import KEY_BYTES, MAX_SETUP_BYTES

_LABEL: Final = b"EXPORTER-sealring-2-link"


@dataclass(frozen=True, slots=True)
class LinkKeys:
    """A link's two keys, one for each direction. `repr` does not show them."""

    send: _native.Secret = field(repr=False)
    receive: _native.Secret = field(repr=False)

    def wipe(self) -> None:
        self.send.wipe()
        self.receive.wipe()


def export_link_keys(connection: Connection, context: bytes, *, dialer: bool) -> LinkKeys:
    """Derives the link's keys from the connection; `context` is its `pair_context`."""
    material = connection.export(_LABEL, 2 * KEY_BYTES, context)
    forth, back = material.part(0, KEY_BYTES), material.part(KEY_BYTES, KEY_BYTES)
    material.wipe()
    return LinkKeys(forth, back) if dialer else LinkKeys(back, forth)


def pair_context(
    connection: Connection,
    terms: Terms,
    peer: VerifiedPeer,
    own_hello: bytes,
    peer_hello: bytes,
    *,
    dialer: bool,
) -> bytes:
    """A digest of 32 bytes over what both ends of this connection have said and proved."""
    ends = [
        (terms.rank, connection.own_fingerprint, own_hello),
        (peer.rank, peer.fingerprint, peer_hello),
    ]
    first, second = ends if dialer else reversed(ends)
    return link_context(
        terms,
        dialer=first[0],
        acceptor=second[0],
        dialer_fingerprint=first[1],
        acceptor_fingerprint=second[1],
        dialer_hello=first[2],
        acceptor_hello=second[2],
    )


class SecureChannel:
    """A connection to a verified peer, for set-up messages only."""

    def __init__(
        self,
        connection: Connection,
        peer: VerifiedPeer,
        peer_hello: Hello,
        link_keys: LinkKeys,
        offer: object = None,
    ) -> None:
        self.connection = connection
        self.peer = peer
        self.peer_hello = peer_hello
        self.link_keys = link_keys
        self.offer = offer
        """What the dialer's Accept offered for the transport, not checked yet."""

    def send(self, message: Mapping[str, Any], deadline: float | None = None) -> None:
        self.connection.deadline = self.connection.deadline if deadline is None else deadline
        with Attributed(self.connection):
            send_message(self.connection, encode_message(message))

    def sending(self, message: Mapping[str, Any]) -> Generator[None, None, None]:
        """Like `send`, without waiting: yields while the peer takes no more."""
        with Attributed(self.connection):
            yield from sending_message(self.connection, encode_message(message))

    def send_raw(self, message: bytearray, deadline: float) -> None:
        """Sends a message that is not JSON, and overwrites it."""
        self.connection.deadline = deadline
        with Attributed(self.connection), Erased(message) as raw:
            send_message(self.connection, raw)

    def receive(self, deadline: float | None = None) -> Message:
        """Waits for the peer's next message. Raises a refusal as the error that it stands for."""
        self.connection.deadline = self.connection.deadline if deadline is None else deadline
        with Attributed(self.connection):
            raw = receive_message(self.connection)
            return understood(raw, self.connection.who, self.peer.rank)

    def awaited(self) -> Generator[None, None, Message]:
        """Like `receive`, without waiting: yields while some of the message is missing."""
        with Attributed(self.connection):
            raw = yield from awaited_message(self.connection)
            return understood(raw, self.connection.who, self.peer.rank)

    def heard(self, deadline: float, most: int) -> Message | bytearray | None:
        """Returns the peer's next message; None while some of it is missing. It does not wait.

        A message that is not JSON begins with a byte below 0x20 and is returned as raw bytes.
        """
        self.connection.deadline = deadline
        with Attributed(self.connection):
            raw = self.connection.message_now(max(most, MAX_SETUP_BYTES))
            if raw is None:
                return None
            if raw and raw[0] < 0x20:
                return raw
            return understood(raw, self.connection.who, self.peer.rank)

    def attributed(self) -> AbstractContextManager[None]:
        """A context in which every HandshakeError names this peer."""
        return Attributed(self.connection)

    def refusing(self) -> AbstractContextManager[None]:
        """A context in which an error names this peer, is sent to it, and closes the channel."""
        return refusing(self.connection)

    def tell(self, error: SealringError) -> None:
        """Sends the peer the error that ends the set-up, if that is still possible."""
        tell(self.connection, error)

    def say_no_more(self) -> None:
        """Forbids refusals from now on: the peer may already be reading records."""
        self.connection.muted = True

    def detach(self) -> socket.socket:
        """Ends the channel without a byte on the wire. The socket then carries records."""
        return self.connection.detach()

    def close(self, until: float | None = None) -> None:
        """Closes after giving the peer a moment (or until `until`) to read the last message."""
        self.connection.close(until)

    @property
    def address(self) -> str:
        return self.connection.address

    @property
    def socket(self) -> socket.socket:
        """The socket, to wait on. Only the channel may read from it until `detach`."""
        return self.connection.socket


@contextmanager
def refusing(connection: Connection) -> Iterator[None]:
    """If the block raises, sends a sealring error to the peer, and always closes the connection."""
    try:
        with Attributed(connection):
            yield
    except SealringError as error:
        tell(connection, error)
        connection.close()
        raise
    except BaseException:
        connection.close(until=time.monotonic())
        raise


class Attributed:
    """A context that names the admitted peer in each HandshakeError that has no other reporter."""

    __slots__ = ("connection",)

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not isinstance(error, HandshakeError) or self.connection.admitted_rank is None:
            return
        if error.reported_by is None:
            error.peer, error.proven = self.connection.admitted_rank, True


def understood(raw: bytes | bytearray, who: str, peer: int) -> Message:
    message = parse_message(raw)
    if message["type"] == "refusal":
        raise error_of(message, who, peer)
    return message


def tell(connection: Connection, error: SealringError, seconds: float = LINGER_SECONDS) -> None:
    if not connection.established or connection.muted or connection.half_sent:
        # TLS failed and has sent its own alert, or no refusal may be sent now.
        return
    connection.deadline = time.monotonic() + seconds
    with suppress(SealringError):
        send_message(connection, encode_message(refusal_of(error)))


def send_message(connection: Connection, message: bytes | bytearray) -> None:
    with Erased(_framed(message)) as whole:
        connection.send(whole)


def sending_message(
    connection: Connection, message: bytes | bytearray
) -> Generator[None, None, None]:
    """Like `send_message`, without waiting: yields while the peer takes no more."""
    with Erased(_framed(message)) as whole:
        yield from connection.sending(whole)


def _framed(message: bytes | bytearray) -> bytearray:
    """A message behind its length, in one piece, so that one TLS record or frame carries it."""
    whole = bytearray(4 + len(message))
    whole[:4] = len(message).to_bytes(4, "big")
    whole[4:] = message
    return whole


def receive_message(connection: Connection, most: int = MAX_SETUP_BYTES) -> bytearray:
    while (message := connection.message_now(most)) is None:
        connection.wait()
    return message


def awaited_message(
    connection: Connection, most: int = MAX_SETUP_BYTES
) -> Generator[None, None, bytearray]:
    """Like `receive_message`, without waiting: yields while some of the message is missing."""
    while (message := connection.message_now(most)) is None:
        yield
    return message
