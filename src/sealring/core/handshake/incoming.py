"""accept: takes a connection that a peer opened, from its first byte to a verified peer.

peers.py shows the messages. Only `accept`, `wait` and `finish` wait for the peer.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Generator

from cryptography import x509

from sealring import _native
from sealring.core.handshake.channel import (
    Attributed,
    SecureChannel,
    awaited_message,
    export_link_keys,
    pair_context,
    refusing,
    sending_message,
    tell,
    understood,
)
from sealring.core.handshake.connection import Connection, address_of, is_ready, never_block
from sealring.core.handshake.messages import Hello, exactly, write_hello
from sealring.core.handshake.peers import (
    ACCEPT,
    admitted_peer,
    check_evidence,
    check_hello,
    keep_session,
    may_go_on,
    understood_hello,
)
from sealring.core.handshake.resumption import FRAME, SessionConnection
from sealring.core.handshake.sessions import Session, SessionTable
from sealring.core.handshake.terms import Terms
from sealring.core.handshake.tls import TlsConnection
from sealring.core.identity.credentials import Credentials, JudgedPeer
from sealring.core.identity.verification import VerifiedPeer
from sealring.errors import MalformedSetup, PeerUnreachable, SealringError

Admit = Callable[[Hello], None]


def accept(
    sock: socket.socket,
    credentials: Credentials,
    terms: Terms,
    deadline: float,
    *,
    admit: Admit | None = None,
    sessions: SessionTable | None = None,
) -> SecureChannel:
    """Answers the peer that connected, by `deadline` (time.monotonic()).

    `admit` gets the hello after all other checks of it, and may raise a HandshakeError to refuse
    the peer. On an error the socket is closed; after success the channel owns it.
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
    """A connection that a peer opened to this worker.

    `advance` and `answering` never wait, so a few threads serve any number of peers that are slow
    to answer.
    """

    def __init__(
        self,
        sock: socket.socket,
        credentials: Credentials | Callable[[], Credentials],
        terms: Terms,
        sessions: SessionTable | None = None,
        terms_for: Callable[[Hello], Terms | None] | None = None,
    ) -> None:
        """`terms_for` chooses the terms for a hello, in the same job and world as `terms`.

        It returns None while these terms are not known yet.

        If `credentials` is a function, it is called when TLS begins, or when the peer has proved
        that it has a session: a stranger must not cause the work of loading a private key.
        """
        self._socket = sock
        self._given = credentials
        self._loaded: Credentials | None = None
        self._terms = terms
        self._terms_for = terms_for
        self._sessions = sessions or SessionTable()
        self.connection: Connection | None = None
        self._certificate: x509.Certificate | None = None
        self._peer: tuple[VerifiedPeer, JudgedPeer | None] | None = None
        never_block(sock)

    @property
    def is_session(self) -> bool | None:
        """Whether the peer names a session; None while too few bytes have come.

        `advance` is quick with a session, and slow with TLS.
        """
        if self.connection is not None:
            return isinstance(self.connection, SessionConnection)
        try:
            first = _native.receive_now(self._socket.fileno(), len(FRAME), peek=True)
        except OSError:
            return False
        if first is None:
            return None
        return None if first and first != FRAME and FRAME.startswith(first) else first == FRAME

    def advance(self) -> bool:
        """Goes on with the bytes that have come. Returns True once the peer is admitted.

        To refuse the peer it raises a HandshakeError, and sends it to the peer if possible. The
        socket stays open so that the peer can read the refusal.
        """
        connection = self.connection = self.connection or self._chosen()
        if connection is None:
            return False
        try:
            with Attributed(connection):
                self._certificate = connection.advance()
                if self._certificate is None:
                    return False
                self._peer = admitted_peer(
                    connection,
                    self._certificate,
                    self._credentials,
                    self._terms,
                    None,
                    self._sessions.certificates,
                )
        except SealringError as error:
            tell(connection, error, seconds=0.0)
            raise
        return True

    def wait(self, deadline: float) -> None:
        """Waits until the peer has sent bytes."""
        if not is_ready(self._socket, select.POLLIN, deadline):
            raise PeerUnreachable(f"{self._who} did not finish the set-up in time")

    def close(self) -> None:
        if self.connection is None:
            self._socket.close()
        else:
            self.connection.close()

    def forget(self) -> None:
        """Overwrites the connection's secrets; nothing is sent any more. The socket stays open."""
        if self.connection is not None:
            self.connection.forget()

    def finish(self, deadline: float, admit: Admit | None = None) -> SecureChannel:
        """Runs `answering` to its end, and waits for the peer. Sends an error to the peer."""
        assert self.connection is not None
        self.connection.deadline = deadline
        with refusing(self.connection):
            answering = self.answering(admit)
            while True:
                try:
                    next(answering)
                except StopIteration as ended:
                    channel: SecureChannel = ended.value
                    return channel
                self.connection.wait()

    def tell(self, error: SealringError) -> None:
        """Tells the peer why it is refused, if that needs no waiting."""
        if self.connection is not None:
            tell(self.connection, error, seconds=0.0)

    @property
    def who(self) -> str:
        return self._who if self.connection is None else self.connection.who

    @property
    def rank(self) -> int | None:
        """The rank of an admitted peer; None before."""
        return None if self.connection is None else self.connection.admitted_rank

    @property
    def deadline(self) -> float:
        """The time by which the link of an admitted peer must be made."""
        assert self.connection is not None
        return self.connection.deadline

    @property
    def _credentials(self) -> Credentials:
        if self._loaded is None:
            given = self._given
            self._loaded = given if isinstance(given, Credentials) else given()
        return self._loaded

    def allow_until(self, deadline: float) -> None:
        """Sets the deadline."""
        assert self.connection is not None
        self.connection.deadline = deadline

    @property
    def _who(self) -> str:
        return f"the peer at {address_of(self._socket)}"

    def _chosen(self) -> Connection | None:
        """Chooses by the first bytes: a peer names a session in the clear; all else must be TLS."""
        if (is_session := self.is_session) is None:
            return None
        if is_session:
            return SessionConnection(
                self._socket,
                self._sessions,
                session=None,
                who=self._who,
                deadline=0.0,
                may_go_on=self._may_go_on,
            )
        return TlsConnection(
            self._socket, self._credentials, dialer=False, who=self._who, deadline=0.0
        )

    def _may_go_on(self, session: Session) -> bool:
        where = address_of(self._socket)
        known = self._sessions.certificates
        return may_go_on(session, self._credentials, self._terms, None, where, known)

    def answering(self, admit: Admit | None = None) -> Generator[None, None, SecureChannel]:
        """Does the rest of `accept` after `advance` has returned True. Returns the channel.

        It never waits: it yields while the terms or a message of the peer are missing, or while the
        peer takes nothing.
        """
        assert self.connection is not None
        with Attributed(self.connection):
            return (yield from self._answer(self.connection, admit))

    def _answer(
        self, connection: Connection, admit: Admit | None
    ) -> Generator[None, None, SecureChannel]:
        assert self._peer is not None
        assert self._certificate is not None
        (peer, judged), terms = self._peer, self._terms
        theirs, hello = understood_hello(
            bytes((yield from awaited_message(connection))), connection, peer
        )
        if self._terms_for is not None:
            while (found := self._terms_for(hello)) is None:
                yield
            terms = found
        check_hello(hello, terms, peer, connection.who)
        if admit is not None:
            admit(hello)
        own = write_hello(terms, peer.rank)
        yield from sending_message(connection, own)
        raw = yield from awaited_message(connection)
        answer = understood(raw, connection.who, peer.rank)
        if answer["type"] != "accept":
            raise MalformedSetup(f"{connection.who} did not answer with an accept")
        exactly(answer, ACCEPT)
        if judged is not None and judged.admission.evidence_limit:
            yield from sending_message(connection, judged.admission.evidence)
            shown = yield from awaited_message(connection, judged.admission.evidence_limit)
            check_evidence(bytes(shown), connection, judged, peer)
        context = pair_context(connection, terms, peer, own, theirs, dialer=False)
        keys = export_link_keys(connection, context, dialer=False)
        if isinstance(connection, TlsConnection):
            keep_session(
                self._sessions,
                connection,
                self._credentials,
                self._certificate,
                peer,
                context,
                dialer=False,
            )
        return SecureChannel(connection, peer, hello, keys, answer["shm"])
