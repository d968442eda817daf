"""What is done with an attempt's connections, on the dialer's threads and the listener's.

Strangers cannot make an attempt fail, nor can workers that are no longer admitted, nor members of
the job that a false address leads here. What they do is logged, and remembered only to explain what
is missing when the time is up.
"""

from __future__ import annotations

import functools
import logging
import socket
import time
from collections.abc import Callable
from typing import Final

from sealring.core.handshake.incoming import Incoming
from sealring.core.handshake.messages import Hello
from sealring.core.handshake.peers import dial
from sealring.core.handshake.sessions import SessionTable
from sealring.core.handshake.terms import Terms
from sealring.core.identity.credentials import Credentials
from sealring.core.links.admitted import HandOver, Serving
from sealring.core.links.agreement import DialersMemory, Transport, settle_as_acceptor
from sealring.core.links.late import LateLinks
from sealring.core.links.late_kind import LinksOfAKind
from sealring.core.links.link import send_without_delay
from sealring.core.links.waiting import WaitingLink, WaitingLinks
from sealring.errors import (
    GroupEnded,
    HandshakeError,
    PeerUnreachable,
    SealringError,
)

_LOG = logging.getLogger("sealring")

_ACCEPT_SECONDS: Final = 10.0
"""How long an admitted worker that dialed us may take to settle the link."""
_DIAL_SECONDS: Final = 30.0
"""Longer: a worker that many dial at once serves them in turn."""


class Connections:
    """Links of an attempt to form a group, and after it those that are made later."""

    def __init__(
        self,
        credentials: Callable[[], Credentials],
        terms: Terms,
        transport: Transport,
        sessions: SessionTable,
        waiting: WaitingLinks,
        deadline: float,
    ) -> None:
        """The `credentials` are asked for each link: the certificate may be renewed meanwhile."""
        self.credentials = credentials
        self._terms = terms
        self._transport: Transport = transport
        self._sessions = sessions
        self._waiting = waiting
        self._deadline = deadline
        self._late: LateLinks | None = None
        self._decided = False
        """It is decided whether the group exists."""

    def decide(self, late: LateLinks | None) -> None:
        """The group exists and makes further links, or no link is to come any more."""
        self._late = late
        self._decided = True

    def dialed(self, sock: socket.socket, rank: int) -> HandOver:
        send_without_delay(sock)
        deadline = min(time.monotonic() + _DIAL_SECONDS, self._deadline)
        with DialersMemory(sock, self._transport, self._terms.host) as own:
            channel = dial(
                sock, self.credentials(), self._terms, rank, deadline, self._sessions, own.offer
            )
            with channel.refusing():
                settled = own.settle(channel)
        return functools.partial(self._waiting.add, WaitingLink(channel, settled, dialer=True))

    def begin(self, sock: socket.socket) -> Incoming:
        terms = self._terms if self._late is None else self._late.collectives.terms
        return Incoming(sock, self.credentials, terms, self._sessions, self._terms_for)

    def _terms_for(self, hello: Hello) -> Terms | None:
        """Of a link for the group's formation, or of one that is made later.

        A member for which the group exists already may be a moment ahead of this one: None then.
        """
        if self._terms.transcript or not hello.transcript:
            return self._terms
        if not self._decided:
            return None
        if self._late is None:
            raise PeerUnreachable(f"for rank {self._terms.rank} the group does not exist")
        return self._late.kind_of(hello).terms

    def admitted(self, incoming: Incoming) -> Serving:
        # Not cut by the deadline of the group's formation: links are made long after it, and at the
        # end of an attempt that fails the listener cuts the connection.
        incoming.allow_until(time.monotonic() + _ACCEPT_SECONDS)
        admitted: list[Hello] = []
        admitted_late: list[tuple[LinksOfAKind, Hello]] = []

        def admit(hello: Hello) -> None:
            if self._late is not None:
                if not hello.transcript:
                    raise PeerUnreachable("the group has formed without this connection")
                kind = self._late.kind_of(hello)
                kind.admit(hello)
                admitted_late.append((kind, hello))
                # The peer may have waited until the group existed here.
                incoming.allow_until(time.monotonic() + _ACCEPT_SECONDS)
                return
            self._waiting.admit(hello)
            admitted.append(hello)

        channel = None
        try:
            channel = yield from incoming.answering(admit)
            with channel.attributed():
                for kind, _ in admitted_late:
                    return (yield from kind.take(channel))
                settled = yield from settle_as_acceptor(channel, self._transport)
            self._waiting.require_open(channel.peer.rank)
            return functools.partial(self._waiting.add, WaitingLink(channel, settled, dialer=False))
        except BaseException:
            if channel is not None:
                channel.link_keys.wipe()
            for hello in admitted:
                self._waiting.forget(hello)
            raise
        finally:
            for kind, hello in admitted_late:
                kind.settled(hello)

    def refused(self, error: SealringError) -> None:
        """Only a disagreement with an admitted member ends the set-up."""
        if self._decided and isinstance(error, PeerUnreachable | GroupEnded):
            # Of two members that dial each other one gives up, perhaps before it proves anything;
            # and one that comes after the group has failed is told so.
            _LOG.debug("sealring: a member's connection is not the link: %s", str(error))
            return
        harmless = self._decided or (
            isinstance(error, HandshakeError)
            and (not error.of_a_member or error.misdirected or isinstance(error, PeerUnreachable))
        )
        if harmless:
            self._waiting.note_stranger(error)
        else:
            self._waiting.fail(error)
