"""dial and accept: from a connected socket to a verified peer with fresh link keys.

    dialer                                acceptor
      | <- TLS 1.3, both certificates; or the session that an earlier TLS connection made ->
      |  verify                        verify  |
      | -- Hello ----------------------------> |  check, admit
      | <---------------------------- Hello -- |
      |  check                                 |
      | -- Accept, with an offer ------------> |
      | -- evidence -------------------------> |  only where the policy has peers show it
      | <------------------------- evidence -- |

At each arrow a Refusal may come instead; it is raised on both sides as the same error. After TLS,
both ends keep a session for their later connections.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from typing import Final

from cryptography import x509

from sealring.errors import (
    HandshakeError,
    MalformedSetup,
    PeerUnreachable,
    ProtocolMismatch,
    SealringError,
)
from sealring.handshake.agreement import check_hello
from sealring.handshake.channel import (
    Attributed,
    SecureChannel,
    address_of,
    receive_message,
    refusing,
    send_message,
    tell,
    understood,
)
from sealring.handshake.connection import Connection, is_ready
from sealring.handshake.judging import JudgedPeer, judge_peer
from sealring.handshake.link_keys import export_link_keys, pair_context
from sealring.handshake.messages import (
    Hello,
    Message,
    encode_message,
    exactly,
    parse_hello,
    parse_message,
    write_hello,
)
from sealring.handshake.refusals import error_of
from sealring.handshake.resumption import FRAME, SessionConnection
from sealring.handshake.sessions import EXPORTED_BYTES, EXPORTER_LABEL, Session, SessionTable
from sealring.handshake.terms import Terms
from sealring.handshake.tls import TlsConnection
from sealring.identity.credentials import Credentials
from sealring.identity.names import WorkerName
from sealring.identity.verification import (
    KnownCertificates,
    VerifiedPeer,
    fingerprint_of,
    verify,
)

_ANSWER_SECONDS: Final = 10.0
"""How long a dialed server may take for TLS: one that is silent must not hold up the next try."""

Admit = Callable[[Hello], None]
Offer = Callable[[VerifiedPeer, Hello], Message | None]
"""The dialer's last word on a checked hello: raises the error to refuse it with, or returns what
its Accept offers for the transport."""
_ACCEPT: Final = frozenset({"type", "shm"})


def dial(
    sock: socket.socket,
    credentials: Credentials,
    terms: Terms,
    peer_rank: int,
    deadline: float,
    sessions: SessionTable | None = None,
    offer: Offer = lambda *_: None,
) -> SecureChannel:
    """Set up the link to `peer_rank` on a connected socket, by `deadline` (time.monotonic()).

    With a session that the table has with this rank, no TLS handshake is made; a TLS handshake
    leaves a session there. On an error the socket is closed; after success the channel owns it.
    """
    connection = _dialed(sock, credentials, terms, peer_rank, deadline, sessions)
    with refusing(connection):
        connection.deadline = min(deadline, time.monotonic() + _ANSWER_SECONDS)
        certificate = connection.handshake()
        connection.deadline = deadline
        known = _known(sessions)
        peer, judged = _admitted(connection, certificate, credentials, terms, peer_rank, known)
        own = write_hello(terms, peer.rank)
        send_message(connection, own)
        theirs, hello = _receive_hello(connection, peer)
        check_hello(hello, terms, peer, connection.who)
        offered = offer(peer, hello)
        context = pair_context(connection, terms, peer, own, theirs, dialer=True)
        keys = export_link_keys(connection, context, dialer=True)
        send_message(connection, encode_message({"type": "accept", "shm": offered}))
        if judged is not None and judged.shows_evidence:
            send_message(connection, judged.admission.evidence)
            _check_evidence(connection, judged, peer)
        if sessions is not None and isinstance(connection, TlsConnection):
            _keep_session(
                sessions, connection, credentials, certificate, peer, context, dialer=True
            )
    return SecureChannel(connection, peer, hello, keys)


def accept(
    sock: socket.socket,
    credentials: Credentials,
    terms: Terms,
    deadline: float,
    *,
    admit: Admit | None = None,
    sessions: SessionTable | None = None,
) -> SecureChannel:
    """Answer the peer that connected, by `deadline` (time.monotonic()).

    `admit` sees the checked hello last of all and may raise the HandshakeError to refuse it with.
    On an error the socket is closed; after success the channel owns it.
    """
    incoming = Incoming(sock, credentials, terms, sessions)
    try:
        while not incoming.advance():
            incoming.wait(deadline)
    except BaseException:
        incoming.close()
        raise
    return incoming.finish(deadline, admit)


class Incoming:
    """A connection that somebody made to us, until that peer is admitted.

    `advance` never waits, so a few threads serve any number of peers that are slow to answer.
    """

    def __init__(
        self,
        sock: socket.socket,
        credentials: Credentials | Callable[[], Credentials],
        terms: Terms,
        sessions: SessionTable | None = None,
        terms_for: Callable[[Hello], Terms] | None = None,
    ) -> None:
        """`terms_for` chooses by the hello what it must agree with, in the same job and world.

        `credentials` that are a function are asked for when TLS begins, or when the peer has proved
        that it has a session: loading a private key is work that a stranger should not cause.
        """
        self._socket = sock
        self._given = credentials
        self._loaded: Credentials | None = None
        self._terms = terms
        self._terms_for = terms_for
        self._sessions = sessions
        self._connection: Connection | None = None
        self._certificate: x509.Certificate | None = None
        self._peer: tuple[VerifiedPeer, JudgedPeer | None] | None = None
        sock.setblocking(False)

    def advance(self) -> bool:
        """Go on with the bytes that have come; True once the peer is admitted.

        Raises the HandshakeError that the peer was refused with and, where it can be, told.
        The socket stays open, so that the peer can read that.
        """
        connection = self._connection = self._connection or self._chosen()
        if connection is None:
            return False
        try:
            with Attributed(connection):
                self._certificate = connection.advance()
                if self._certificate is None:
                    return False
                self._peer = _admitted(
                    connection,
                    self._certificate,
                    self._credentials,
                    self._terms,
                    None,
                    _known(self._sessions),
                )
        except SealringError as error:
            tell(connection, error, seconds=0.0)
            raise
        return True

    def wait(self, deadline: float) -> None:
        """Until bytes of the peer are there."""
        if not is_ready(self._socket, select.POLLIN, deadline):
            raise PeerUnreachable(f"{self._who} did not finish the set-up in time")

    def close(self) -> None:
        if self._connection is None:
            self._socket.close()
        else:
            self._connection.close()

    def finish(self, deadline: float, admit: Admit | None = None) -> SecureChannel:
        """The rest of `accept`, after `advance` has returned True."""
        assert self._connection is not None
        self._connection.deadline = deadline
        with refusing(self._connection):
            return self._answer(self._connection, admit)

    @property
    def _credentials(self) -> Credentials:
        if self._loaded is None:
            given = self._given
            self._loaded = given if isinstance(given, Credentials) else given()
        return self._loaded

    def allow_until(self, deadline: float) -> None:
        """Replace the deadline that `finish` was given."""
        assert self._connection is not None
        self._connection.deadline = deadline

    @property
    def _who(self) -> str:
        return f"the peer at {address_of(self._socket)}"

    def _chosen(self) -> Connection | None:
        """By the first bytes: a session is named in the clear, everything else must be TLS."""
        if self._sessions is not None:
            try:
                first = self._socket.recv(len(FRAME), socket.MSG_PEEK)
            except BlockingIOError:
                return None
            except OSError:
                first = b""
            if first == FRAME:
                return SessionConnection(
                    self._socket,
                    self._sessions,
                    session=None,
                    who=self._who,
                    deadline=0.0,
                    may_go_on=self._may_go_on,
                )
            if first and FRAME.startswith(first):
                return None
        return TlsConnection(
            self._socket, self._credentials, dialer=False, who=self._who, deadline=0.0
        )

    def _may_go_on(self, session: Session) -> bool:
        where = address_of(self._socket)
        known = _known(self._sessions)
        return _may_go_on(session, self._credentials, self._terms, None, where, known)

    def _answer(self, connection: Connection, admit: Admit | None) -> SecureChannel:
        """The acceptor's part after the peer is admitted."""
        assert self._peer is not None
        assert self._certificate is not None
        (peer, judged), terms = self._peer, self._terms
        theirs, hello = _receive_hello(connection, peer)
        if self._terms_for is not None:
            terms = self._terms_for(hello)
        check_hello(hello, terms, peer, connection.who)
        if admit is not None:
            admit(hello)
        own = write_hello(terms, peer.rank)
        send_message(connection, own)
        answer = understood(receive_message(connection), connection.who, peer.rank)
        if answer["type"] != "accept":
            raise MalformedSetup(f"{connection.who} did not answer with an accept")
        exactly(answer, _ACCEPT)
        if judged is not None and judged.shows_evidence:
            _check_evidence(connection, judged, peer)
            send_message(connection, judged.admission.evidence)
        context = pair_context(connection, terms, peer, own, theirs, dialer=False)
        keys = export_link_keys(connection, context, dialer=False)
        if self._sessions is not None and isinstance(connection, TlsConnection):
            _keep_session(
                self._sessions,
                connection,
                self._credentials,
                self._certificate,
                peer,
                context,
                dialer=False,
            )
        return SecureChannel(connection, peer, hello, keys, answer["shm"])


def _dialed(
    sock: socket.socket,
    credentials: Credentials,
    terms: Terms,
    rank: int,
    deadline: float,
    sessions: SessionTable | None,
) -> Connection:
    address = address_of(sock)
    who = f"the peer at {address} (to be rank {rank})"
    session = None if sessions is None else sessions.with_rank(rank)
    try:
        if sessions is not None and session is not None:
            known = sessions.certificates
            if not _may_go_on(session, credentials, terms, rank, address, known):
                # Not the end of the attempt: its rank may be another process's by now.
                sessions.discard(session)
                return _dialed(sock, credentials, terms, rank, deadline, None)
            return SessionConnection(sock, sessions, session=session, who=who, deadline=deadline)
        return TlsConnection(sock, credentials, dialer=True, who=who, deadline=deadline)
    except BaseException:
        sock.close()
        raise


def _keep_session(
    sessions: SessionTable,
    connection: TlsConnection,
    credentials: Credentials,
    certificate: x509.Certificate,
    peer: VerifiedPeer,
    context: bytes,
    *,
    dialer: bool,
) -> None:
    material = connection.export(EXPORTER_LABEL, EXPORTED_BYTES, context)
    sessions.add(
        Session.exported(material, peer.rank, credentials.certificate, certificate, dialer=dialer)
    )


def _known(sessions: SessionTable | None) -> KnownCertificates | None:
    return None if sessions is None else sessions.certificates


def _admitted(
    connection: Connection,
    certificate: x509.Certificate,
    credentials: Credentials,
    terms: Terms,
    rank: int | None,
    known: KnownCertificates | None,
) -> tuple[VerifiedPeer, JudgedPeer | None]:
    address = address_of(connection.socket)
    peer, judged = verified(certificate, credentials, terms, rank, address, known)
    connection.admitted_rank = peer.rank
    connection.who = f"rank {peer.rank} at {address}"
    connection.check_negotiated()
    return peer, judged


def _may_go_on(
    session: Session,
    credentials: Credentials,
    terms: Terms,
    rank: int | None,
    address: str,
    known: KnownCertificates | None,
) -> bool:
    """Whether TLS would now prove the same two keys, and the peer would be admitted."""
    if session.own_certificate.public_key() != credentials.certificate.public_key():
        return False
    try:
        verified(session.peer_certificate, credentials, terms, rank, address, known)
    except SealringError:
        return False
    return True


def verified(
    certificate: x509.Certificate,
    credentials: Credentials,
    terms: Terms,
    rank: int | None,
    address: str,
    known: KnownCertificates | None,
    fingerprint: bytes | None = None,
) -> tuple[VerifiedPeer, JudgedPeer | None]:
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
        judge_dates=not _was_in_date(certificate, credentials, terms),
        known=known,
        fingerprint=fingerprint,
    )
    return peer, judged


def _was_in_date(certificate: x509.Certificate, credentials: Credentials, terms: Terms) -> bool:
    """A group that exists does not end with its members' certificates, as its first links do not.

    Where a broker renews certificates, one that has ended is a member that is no longer admitted.
    """
    if credentials.admission is not None or not terms.certificates:
        return False
    return fingerprint_of(certificate) in terms.certificates


def _receive_hello(connection: Connection, peer: VerifiedPeer) -> tuple[bytes, Hello]:
    raw = bytes(receive_message(connection))
    try:
        message = parse_message(raw)
        if message["type"] == "refusal":
            raise error_of(message, connection.who, peer.rank)
        hello = parse_hello(raw)
    except (MalformedSetup, ProtocolMismatch) as error:
        # The parser knows no peers.
        raise type(error)(f"{connection.who}: {error}") from None
    return raw, hello


def _check_evidence(connection: Connection, judged: JudgedPeer, peer: VerifiedPeer) -> None:
    raw = bytes(receive_message(connection, judged.admission.evidence_limit))
    try:
        message = parse_message(raw)
    except MalformedSetup:
        message = {"type": "evidence"}  # it has no type of ours
    if message["type"] == "refusal":
        raise error_of(message, connection.who, peer.rank)
    # A peer whose evidence does not pass is not admitted, whatever its certificate says.
    connection.admitted_rank = None
    try:
        judged.check_evidence(raw, connection.who)
    except HandshakeError as error:
        error.peer = peer.rank
        raise
    connection.admitted_rank = peer.rank
