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
from typing import Any, Final

from cryptography import x509

from sealring import _native
from sealring.errors import (
    HandshakeError,
    MalformedSetup,
    ProtocolMismatch,
    SealringError,
)
from sealring.handshake.agreement import check_hello
from sealring.handshake.judging import JudgedPeer, judge_peer
from sealring.handshake.link_keys import LinkKeys, export_link_keys
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
from sealring.handshake.terms import Terms
from sealring.handshake.tls import LINGER_SECONDS, TlsConnection
from sealring.identity.credentials import Credentials
from sealring.identity.names import WorkerName
from sealring.identity.verification import VerifiedPeer, verify
from sealring.limits import MAX_SETUP_BYTES

_ANSWER_SECONDS: Final = 10.0
"""How long a dialed server may take for TLS: one that is silent must not hold up the next try."""

Admit = Callable[[Hello], None]


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
        tls.deadline = min(deadline, time.monotonic() + _ANSWER_SECONDS)
        certificate = tls.handshake()
        tls.deadline = deadline
        peer, judged = _admitted(tls, certificate, credentials, terms, peer_rank)
        own = write_hello(terms, peer.rank)
        _send(tls, own)
        theirs, hello = _receive_hello(tls, terms, peer)
        _send(tls, encode_message({"type": "accept"}))
        if judged is not None and judged.shows_evidence:
            _send(tls, judged.admission.evidence)
            _check_evidence(tls, judged, peer)
        keys = export_link_keys(tls, credentials, terms, peer, own, theirs, dialer=True)
    return SecureChannel(tls, peer, hello, keys)


def accept(
    sock: socket.socket,
    credentials: Credentials,
    terms: Terms,
    deadline: float,
    *,
    admit: Admit | None = None,
) -> SecureChannel:
    """Answer the peer that connected, by `deadline` (time.monotonic()).

    `admit` sees the checked hello last of all and may raise the HandshakeError to refuse it with.
    On an error the socket is closed; after success the channel owns it.
    """
    tls = _connection(sock, credentials, dialer=False, rank=None, deadline=deadline)
    with _refusing(tls):
        peer, judged = _admitted(tls, tls.handshake(), credentials, terms, None)
        return _answer(tls, peer, judged, credentials, terms, admit)


class Incoming:
    """A connection that somebody made to us, until that peer is admitted.

    `advance` never waits, so a few threads serve any number of peers that are slow to answer.
    """

    def __init__(self, sock: socket.socket, credentials: Credentials, terms: Terms) -> None:
        self._credentials = credentials
        self._terms = terms
        who = f"the peer at {address_of(sock)}"
        self._tls = TlsConnection(sock, credentials, dialer=False, who=who, deadline=0.0)
        self._peer: tuple[VerifiedPeer, JudgedPeer | None] | None = None

    def advance(self) -> bool:
        """Go on with the bytes that have come; True once the peer is admitted.

        Raises the HandshakeError that the peer was refused with and, where TLS allows, told.
        The socket stays open, so that the peer can read that.
        """
        try:
            with _attributed(self._tls):
                certificate = self._tls.advance()
                if certificate is None:
                    return False
                self._peer = _admitted(self._tls, certificate, self._credentials, self._terms, None)
        except SealringError as error:
            _tell(self._tls, error, seconds=0.0)
            raise
        return True

    def finish(self, deadline: float, admit: Admit | None = None) -> SecureChannel:
        """The rest of `accept`, after `advance` has returned True."""
        assert self._peer is not None
        peer, judged = self._peer
        self._tls.deadline = deadline
        with _refusing(self._tls):
            return _answer(self._tls, peer, judged, self._credentials, self._terms, admit)


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
    """From the moment a peer is admitted, all that goes wrong on its connection is its doing."""
    try:
        yield
    except HandshakeError as error:
        if tls.admitted_rank is not None:
            error.peer, error.proven = tls.admitted_rank, True
        raise


def _admitted(
    tls: TlsConnection,
    certificate: x509.Certificate,
    credentials: Credentials,
    terms: Terms,
    rank: int | None,
) -> tuple[VerifiedPeer, JudgedPeer | None]:
    address = address_of(tls.socket)
    judged: JudgedPeer | None = None

    def judge(name: WorkerName) -> None:
        nonlocal judged
        if credentials.admission is not None:
            who = f"rank {name.rank} at {address}"
            judged = judge_peer(credentials.admission, certificate, name, who)

    peer = verify(
        certificate,
        credentials.authorities,
        job=terms.job,
        world=terms.world,
        rank=rank,
        where=address,
        judge=judge,
    )
    tls.admitted_rank = peer.rank
    tls.who = f"rank {peer.rank} at {address}"
    tls.check_negotiated()
    return peer, judged


def _answer(
    tls: TlsConnection,
    peer: VerifiedPeer,
    judged: JudgedPeer | None,
    credentials: Credentials,
    terms: Terms,
    admit: Admit | None,
) -> SecureChannel:
    """The acceptor's part after TLS."""
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
    keys = export_link_keys(tls, credentials, terms, peer, own, theirs, dialer=False)
    return SecureChannel(tls, peer, hello, keys)


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
    # A peer whose evidence does not pass is not admitted, whatever its certificate says.
    tls.admitted_rank = None
    try:
        judged.check_evidence(raw, tls.who)
    except HandshakeError as error:
        error.peer = peer.rank
        raise
    tls.admitted_rank = peer.rank


def _understood(raw: bytes | bytearray, who: str, peer: int) -> Message:
    message = parse_message(raw)
    if message["type"] == "refusal":
        raise error_of(message, who, peer)
    return message


def _tell(tls: TlsConnection, error: SealringError, seconds: float = LINGER_SECONDS) -> None:
    if not tls.established:
        return  # TLS itself failed; it has sent its alert
    tls.deadline = time.monotonic() + seconds
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
