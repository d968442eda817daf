"""dial and accept: from a connected socket to a verified peer with fresh link keys.

    dialer                                acceptor
      | <---- TLS 1.3, both certificates ----> |
      |  verify                        verify  |
      | -- Hello ----------------------------> |  check, admit
      | <---------------------------- Hello -- |
      |  check                                 |
      | -- Accept ---------------------------> |
      | -- evidence -------------------------> |  only where the policy has peers show it
      | <------------------------- evidence -- |

At each arrow a Refusal may come instead; it is raised on both sides as the same error.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from sealring import _native
from sealring.errors import (
    HandshakeError,
    MalformedSetup,
    ProtocolMismatch,
    SealringError,
)
from sealring.handshake.agreement import check_hello
from sealring.handshake.judging import JudgedPeer, judge_peer
from sealring.handshake.messages import (
    Hello,
    Message,
    encode_message,
    parse_hello,
    parse_message,
    write_hello,
)
from sealring.handshake.refusals import error_of, refusal_of
from sealring.handshake.secrets import erased, take_key, write_key
from sealring.handshake.terms import Terms, link_context
from sealring.handshake.tls import LINGER_SECONDS, TlsConnection
from sealring.identity.credentials import Credentials
from sealring.identity.verification import VerifiedPeer, verify
from sealring.limits import KEY_BYTES, MAX_SETUP_BYTES

_LABEL: Final = b"EXPORTER-sealring-1-link"

Admit = Callable[[Hello], None]


@dataclass(frozen=True, slots=True)
class LinkKeys:
    """One key per direction. Not printable."""

    send: _native.Secret = field(repr=False)
    receive: _native.Secret = field(repr=False)

    def wipe(self) -> None:
        self.send.wipe()
        self.receive.wipe()


class SecureChannel:
    """A verified peer at the other end of a TLS connection, for set-up messages only."""

    def __init__(
        self, tls: TlsConnection, peer: VerifiedPeer, peer_hello: Hello, link_keys: LinkKeys
    ) -> None:
        self._tls = tls
        self.peer = peer
        self.peer_hello = peer_hello
        self.link_keys = link_keys

    def send(self, message: Mapping[str, Any], deadline: float | None = None) -> None:
        self._tls.deadline = self._tls.deadline if deadline is None else deadline
        with _attributed(self._tls):
            _send(self._tls, encode_message(message))

    def send_key(self, message: Mapping[str, Any], field: str, key: _native.Secret) -> None:
        """The message with `key` in this field, in hexadecimal."""
        with _attributed(self._tls), erased(write_key(message, field, key)) as raw:
            _send(self._tls, raw)

    def receive(self, deadline: float | None = None) -> Message:
        """The peer's next message; raises the error that it stands for if it is a refusal."""
        self._tls.deadline = self._tls.deadline if deadline is None else deadline
        with _attributed(self._tls):
            return _understood(_receive(self._tls), self._tls.who, self.peer.rank)

    def receive_key(self, field: str) -> tuple[Message, _native.Secret | None]:
        """The next message and the key in this field, which the message itself has no more."""
        with _attributed(self._tls), erased(_receive(self._tls)) as raw:
            key = take_key(raw, field)
            return _understood(raw, self._tls.who, self.peer.rank), key

    def refusing(self) -> AbstractContextManager[None]:
        """In it, whatever goes wrong is laid to this peer and told to it; the channel is closed."""
        return _refusing(self._tls)

    def tell(self, error: SealringError) -> None:
        """Say why this ends, as far as that can still be said."""
        _tell(self._tls, error)

    def detach(self) -> socket.socket:
        """End TLS without a byte on the wire; the socket then carries records."""
        return self._tls.detach()

    def close(self, until: float | None = None) -> None:
        """Close, after giving the peer a moment (or until then) to read what was said."""
        self._tls.close(until)

    @property
    def socket(self) -> socket.socket:
        """To wait on. Only TLS may read from it until `detach`."""
        return self._tls.socket


def dial(
    sock: socket.socket,
    credentials: Credentials,
    terms: Terms,
    peer_rank: int,
    deadline: float,
) -> SecureChannel:
    """Set up the link to `peer_rank` on a connected socket, by `deadline` (time.monotonic()).

    On an error the socket is closed; after success the channel owns it.
    """
    tls = _connection(sock, credentials, dialer=True, rank=peer_rank, deadline=deadline)
    with _refusing(tls):
        peer, judged = _verified(tls, credentials, terms, peer_rank)
        own = write_hello(terms, peer.rank)
        _send(tls, own)
        theirs, hello = _receive_hello(tls, terms, peer)
        _send(tls, encode_message({"type": "accept"}))
        if judged is not None and judged.shows_evidence:
            _send(tls, judged.admission.evidence)
            _check_evidence(tls, judged, peer)
        keys = _link_keys(tls, credentials, terms, peer, own, theirs, dialer=True)
    return SecureChannel(tls, peer, hello, keys)


def accept(
    sock: socket.socket,
    credentials: Credentials,
    terms: Terms,
    deadline: float,
    *,
    admit: Admit | None = None,
) -> SecureChannel:
    """Answer whoever connected, by `deadline` (time.monotonic()).

    `admit` sees the checked hello last of all and may raise the HandshakeError to refuse it with.
    On an error the socket is closed; after success the channel owns it.
    """
    tls = _connection(sock, credentials, dialer=False, rank=None, deadline=deadline)
    with _refusing(tls):
        peer, judged = _verified(tls, credentials, terms, None)
        theirs, hello = _receive_hello(tls, terms, peer)
        if admit is not None:
            admit(hello)
        own = write_hello(terms, peer.rank)
        _send(tls, own)
        answer = _understood(_receive(tls), tls.who, peer.rank)
        if answer != {"type": "accept"}:
            raise MalformedSetup(f"{tls.who} did not answer with an accept")
        if judged is not None and judged.shows_evidence:
            _check_evidence(tls, judged, peer)
            _send(tls, judged.admission.evidence)
        keys = _link_keys(tls, credentials, terms, peer, own, theirs, dialer=False)
    return SecureChannel(tls, peer, hello, keys)


def address_of(sock: socket.socket) -> str:
    try:
        name = sock.getpeername()
    except OSError:
        return "an address already gone"
    if not isinstance(name, tuple):
        return "a local socket"
    host, port = name[0], name[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _connection(
    sock: socket.socket,
    credentials: Credentials,
    *,
    dialer: bool,
    rank: int | None,
    deadline: float,
) -> TlsConnection:
    address = address_of(sock)
    who = f"the peer at {address}" if rank is None else f"the peer at {address} (to be rank {rank})"
    try:
        return TlsConnection(sock, credentials, dialer=dialer, who=who, deadline=deadline)
    except BaseException:
        sock.close()
        raise


@contextmanager
def _refusing(tls: TlsConnection) -> Iterator[None]:
    """Whatever ends the set-up here is told to the peer, and the socket does not outlive it."""
    try:
        with _attributed(tls):
            yield
    except SealringError as error:
        _tell(tls, error)
        tls.close()
        raise
    except BaseException:
        tls.close(until=time.monotonic())
        raise


@contextmanager
def _attributed(tls: TlsConnection) -> Iterator[None]:
    """From the moment a peer is verified, all that goes wrong on its connection is its doing."""
    try:
        yield
    except HandshakeError as error:
        if tls.verified_rank is not None:
            error.peer, error.proven = tls.verified_rank, True
        raise


def _verified(
    tls: TlsConnection, credentials: Credentials, terms: Terms, rank: int | None
) -> tuple[VerifiedPeer, JudgedPeer | None]:
    certificate = tls.handshake()
    address = address_of(tls.socket)
    peer = verify(
        certificate,
        credentials.authorities,
        job=terms.job,
        world=terms.world,
        rank=rank,
        where=address,
    )
    tls.verified_rank = peer.rank
    tls.who = f"rank {peer.rank} at {address}"
    tls.check_negotiated()
    if credentials.admission is None:
        return peer, None
    return peer, judge_peer(credentials.admission, certificate, peer, tls.who)


def _receive_hello(tls: TlsConnection, terms: Terms, peer: VerifiedPeer) -> tuple[bytes, Hello]:
    raw = bytes(_receive(tls))
    try:
        message = parse_message(raw)
        if message["type"] == "refusal":
            raise error_of(message, tls.who, peer.rank)
        hello = parse_hello(raw)
    except (MalformedSetup, ProtocolMismatch) as error:
        # The parser knows no peers.
        raise type(error)(f"{tls.who}: {error}") from None
    check_hello(hello, terms, peer, tls.who)
    return raw, hello


def _check_evidence(tls: TlsConnection, judged: JudgedPeer, peer: VerifiedPeer) -> None:
    raw = bytes(_receive(tls, judged.admission.evidence_limit))
    try:
        message = parse_message(raw)
    except MalformedSetup:
        message = {"type": "evidence"}  # it has no type of ours
    if message["type"] == "refusal":
        raise error_of(message, tls.who, peer.rank)
    judged.check_evidence(raw, tls.who)


def _link_keys(
    tls: TlsConnection,
    credentials: Credentials,
    terms: Terms,
    peer: VerifiedPeer,
    own_hello: bytes,
    peer_hello: bytes,
    *,
    dialer: bool,
) -> LinkKeys:
    ends = [
        (terms.rank, credentials.fingerprint, own_hello),
        (peer.rank, peer.fingerprint, peer_hello),
    ]
    first, second = ends if dialer else reversed(ends)
    context = link_context(
        terms,
        dialer=first[0],
        acceptor=second[0],
        dialer_fingerprint=first[1],
        acceptor_fingerprint=second[1],
        dialer_hello=first[2],
        acceptor_hello=second[2],
    )
    material = tls.export(_LABEL, 2 * KEY_BYTES, context)
    forth, back = material.part(0, KEY_BYTES), material.part(KEY_BYTES, KEY_BYTES)
    material.wipe()
    return LinkKeys(forth, back) if dialer else LinkKeys(back, forth)


def _understood(raw: bytes | bytearray, who: str, peer: int) -> Message:
    message = parse_message(raw)
    if message["type"] == "refusal":
        raise error_of(message, who, peer)
    return message


def _tell(tls: TlsConnection, error: SealringError) -> None:
    if not tls.established:
        return  # TLS itself failed; it has sent its alert
    tls.deadline = time.monotonic() + LINGER_SECONDS
    with suppress(SealringError):
        _send(tls, encode_message(refusal_of(error)))


def _send(tls: TlsConnection, message: bytes | bytearray) -> None:
    # One piece, so that one TLS record carries it.
    whole = bytearray(4 + len(message))
    whole[:4] = len(message).to_bytes(4, "big")
    whole[4:] = message
    with erased(whole):
        tls.send(whole)


def _receive(tls: TlsConnection, most: int = MAX_SETUP_BYTES) -> bytearray:
    length = int.from_bytes(tls.receive(4), "big")
    # Before a byte of it is read or room is made for it.
    if length > most:
        raise MalformedSetup(f"{tls.who} announced a set-up message of {length} bytes")
    return tls.receive(length)
