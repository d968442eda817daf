"""The connections of an attempt to form a group, on the dialer's threads and the listener's.

Strangers cannot make an attempt fail. Neither can workers that are no longer admitted, nor members
of the job that a false address leads here. Their connections are logged, and remembered only to
explain which member is missing when the time is up.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from sealring import _native
from sealring.core.handshake.channel import SecureChannel
from sealring.core.handshake.incoming import Incoming
from sealring.core.handshake.messages import Hello, Message
from sealring.core.handshake.peers import dial
from sealring.core.handshake.sessions import SessionTable
from sealring.core.handshake.terms import PipeName, Terms
from sealring.core.identity.credentials import Credentials
from sealring.core.identity.verification import VerifiedPeer
from sealring.core.links.agreement import DialersMemory, Settled, Transport, settle_as_acceptor
from sealring.core.links.arrivals import HandOver, Serving
from sealring.core.links.diagnosis import is_telling
from sealring.core.links.exchange import Exchange
from sealring.core.links.link import send_without_delay
from sealring.errors import (
    DuplicateRank,
    GroupEnded,
    HandshakeError,
    PeerUnreachable,
    SealringError,
)

_LOG = logging.getLogger("sealring")

_LOGGED_STRANGERS: Final = 16
FAREWELL_SECONDS: Final = 2.0
"""How long a worker whose set-up failed stays to tell the others why."""


@dataclass(slots=True, eq=False)
class WaitingLink:
    channel: SecureChannel
    settled: Settled
    dialer: bool
    closed: bool = False
    """The peer has said that all its first links exist. It replaces none of them any more."""
    linked: dict[int, str] = field(default_factory=dict)
    """By rank: the instances with which the peer said that it is linked."""
    ready: str = ""
    """The transcript of the peer's "ready", which says that the group exists for it. Its next bytes
    are records, so the channel must not be read again."""
    lost: bool = False
    """The group exists here, and the peer does not say so."""

    @property
    def rank(self) -> int:
        return self.channel.peer.rank

    def has_bytes(self) -> bool | None:
        """Whether there is something to read; None if the connection is cut. Reads nothing."""
        try:
            first = _native.receive_now(self.channel.socket.fileno(), 1, peek=True)
        except OSError:
            return None
        return False if first is None else True if first else None

    def discard(self, until: float) -> None:
        # The error's traceback may keep the link, but not its memory.
        self.settled = Settled(None)
        self.channel.link_keys.wipe()
        self.channel.close(until)


class WaitingLinks:
    """The links that an attempt has so far. Each change wakes a thread that polls `wake`.

    Every method may be called from any thread.
    """

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._lock = threading.Lock()
        self._links: dict[int, WaitingLink] = {}
        self._instances: dict[int, str] = {}
        self._replaced: list[WaitingLink] = []
        self._strangers: deque[HandshakeError] = deque(maxlen=_LOGGED_STRANGERS)
        self._telling: dict[int | None, HandshakeError] = {}
        self._refused = 0
        self._failure: SealringError | None = None
        self._closed = False
        self._told: SealringError | None = None
        self._newcomers: list[WaitingLink] = []
        """Links that came after the set-up had failed."""
        self._dialed: set[int] = set()
        """Ranks that are dialed from here until there is a link with them."""
        self._made: set[int] = set()
        """Ranks to which this worker, having dialed, is making a link."""
        self._taken: Counter[int] = Counter()
        """Ranks whose connections were admitted and are no links yet: how many."""
        self._informed: set[int] = set()
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def admit(self, hello: Hello) -> None:
        """Final admission check of a verified worker that dialed us. Raises if it is refused."""
        rank = hello.sender
        # After PeerUnreachable the dialer would try again. On a link it ends the peer's attempt as
        # well: such a peer is linked first, and then told.
        if self._told is not None and not isinstance(self._told, PeerUnreachable):
            self.mark_informed(rank)
            raise copy.copy(self._told)
        if hello.instance == self._terms.instance:
            raise PeerUnreachable(f"rank {rank} reached itself: the rendezvous store is wrong")
        with self._lock:
            link = self._links.get(rank)
            linked = None if link is None else link.channel.peer_hello.instance
            known = self._instances.setdefault(rank, linked or hello.instance)
            # The higher of two ranks opens one connection of the pair at a time, on either side.
            busy = rank < self._terms.rank and (
                rank in self._made or (link is not None and link.dialer)
            )
            if known == hello.instance and not busy:
                self._taken[rank] += 1
        if known != hello.instance:
            raise DuplicateRank(
                f"a second worker holds rank {rank}, on {hello.host}: two workers were started "
                "with one RANK, or an earlier run is still alive"
            )
        if busy:
            raise PeerUnreachable(f"rank {rank} has been connected to from here")

    def dial(self, rank: int) -> bool:
        """Notes that a rank is dialed; False if there is a link with it or it is dialed already."""
        with self._lock:
            if rank in self._links or rank in self._dialed:
                return False
            self._dialed.add(rank)
        return True

    def is_linked(self, rank: int) -> bool:
        """Whether there is a link with this rank: then it is not dialed any more."""
        with self._lock:
            if rank in self._links:
                self._dialed.discard(rank)
            return rank in self._links

    @contextmanager
    def making(self, rank: int) -> Iterator[Callable[[], None]]:
        """The block in which a dialed connection becomes a link.

        It calls the function that it gets, which raises if a connection that the peer dialed is
        the link, or is about to be.
        """

        def claim() -> None:
            with self._lock:
                if rank in self._links or (rank < self._terms.rank and self._taken[rank] > 0):
                    raise PeerUnreachable(f"rank {rank} has connected itself", peer=rank)
                self._made.add(rank)

        try:
            yield claim
        except BaseException:
            with self._lock:
                self._made.discard(rank)
            raise

    def forget(self, hello: Hello) -> None:
        """Frees the place of an admitted worker whose link was not completed."""
        with self._lock:
            self._taken[hello.sender] -= 1
            link = self._links.get(hello.sender)
            linked = link is not None and link.channel.peer_hello.instance == hello.instance
            if not linked and self._instances.get(hello.sender) == hello.instance:
                del self._instances[hello.sender]

    def add(self, link: WaitingLink) -> None:
        """Takes a link. Never waits: the thread that serves all listeners may be the caller."""
        with self._lock:
            if link.dialer:
                self._made.discard(link.rank)
                self._dialed.discard(link.rank)
            else:
                self._taken[link.rank] -= 1
            too_late = self._closed and self._told is None
            if self._told is not None:
                self._newcomers.append(link)
            elif not too_late:
                # One instance that connects again has given up its earlier connection.
                if link.rank in self._links:
                    self._replaced.append(self._links[link.rank])
                self._links[link.rank] = link
        if too_late:
            link.discard(until=time.monotonic())
        self._wake()

    def require_open(self, rank: int) -> None:
        """Raises an error if the link of this peer comes too late. The error says why."""
        with self._lock:
            if not self._closed:
                return
            told = self._told
        if told is None:
            raise PeerUnreachable(f"the first links of rank {self._terms.rank} are there already")
        self.mark_informed(rank)
        raise copy.copy(told)

    def remove(self, link: WaitingLink) -> bool:
        """Removes a link whose connection is cut. False if links can no longer be replaced."""
        with self._lock:
            if self._closed:
                return False
            if self._links.get(link.rank) is link:
                del self._links[link.rank]
                self._instances.pop(link.rank, None)
                self._replaced.append(link)
        return True

    def fail(self, error: SealringError) -> None:
        """Ends the set-up with an error; `present` raises the first one."""
        with self._lock:
            self._failure = self._failure or error
        # A refusal is known at both ends; of a rank held twice, there is another one to tell.
        if (
            isinstance(error, HandshakeError)
            and error.of_a_member
            and error.met is not None
            and not error.misdirected
            and not isinstance(error, DuplicateRank | PeerUnreachable)
        ):
            self.mark_informed(error.met)
        self._wake()

    def release(self) -> None:
        """Closes `wake`: no thread polls it any more."""
        with self._lock:
            wake, self.wake = self.wake, -1
        if wake >= 0:
            os.close(wake)

    def _wake(self) -> None:
        with self._lock:
            if self.wake >= 0:
                os.eventfd_write(self.wake, 1)

    def note_stranger(self, error: SealringError) -> None:
        # It is kept as long as the group. Its traceback would keep the connection as well.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        with self._lock:
            if isinstance(error, HandshakeError):
                self._strangers.append(error)
                # Kept by rank, so that a flood of others does not hide why a rank is missing.
                if is_telling(error) and error.peer in (None, *self._terms.members):
                    self._telling[error.peer] = error
            self._refused += 1
            count = self._refused
        # All of the first few, then ever fewer: a stranger must not fill the disk either.
        if count <= _LOGGED_STRANGERS or count.bit_count() == 1:
            _LOG.warning("sealring: connection %d was refused: %s", count, error)

    def strangers(self) -> list[HandshakeError]:
        with self._lock:
            return [*self._telling.values(), *self._strangers]

    def present(self) -> list[WaitingLink]:
        """The links so far, in the order of their ranks. Raises the error that ended the set-up."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            replaced, self._replaced = self._replaced, []
            links = [self._links[rank] for rank in sorted(self._links)]
        # Here and not where they were replaced: the caller may have been waiting on them.
        for link in replaced:
            link.discard(until=time.monotonic())
        return links

    def close(self) -> bool:
        """Takes no link from now on. True for the first call."""
        with self._lock:
            first, self._closed = not self._closed, True
        return first

    def tell(self, links: Collection[WaitingLink]) -> None:
        """Tells their peers why there will be no group. May wait a moment for each."""
        assert self._told is not None
        for link in links:
            link.channel.tell(self._told)
            self.mark_informed(link.rank)

    def mark_informed(self, rank: int) -> None:
        with self._lock:
            self._informed.add(rank)
        self._wake()

    def are_informed(self, ranks: Collection[int]) -> bool:
        with self._lock:
            return self._informed.issuperset(ranks)

    def take_all(self, told: SealringError) -> list[WaitingLink]:
        """Closes, and hands all links to the caller. Peers that come later get the error `told`."""
        report = copy.copy(told)
        if isinstance(report, HandshakeError):
            report.reported_by = self._terms.rank  # so it is told with the rank that it is about
        with self._lock:
            self._closed = True
            self._told = report
            links = [*self._links.values(), *self._replaced]
            self._links.clear()
            self._replaced.clear()
        return links

    def take_newcomers(self) -> list[WaitingLink]:
        """Hands the links that came after `take_all` to the caller."""
        with self._lock:
            links, self._newcomers = self._newcomers, []
        return links


_ACCEPT_SECONDS: Final = 10.0
"""How long an admitted worker that dialed us may take to settle the link."""
_DIAL_SECONDS: Final = 30.0
"""Longer: a worker that many dial at once serves them in turn."""


class Connections:
    """Makes links of connections; once the group exists, passes connections to the exchange."""

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
        self._exchange: Exchange | None = None
        self._decided = False
        """It is decided whether the group exists."""

    def decide(self, exchange: Exchange | None) -> None:
        """Says that the group exists and `exchange` opens further pipes; None: that it failed."""
        self._exchange = exchange
        self._decided = True

    def dialed(self, sock: socket.socket, pipe: PipeName) -> HandOver:
        send_without_delay(sock)
        deadline = min(time.monotonic() + _DIAL_SECONDS, self._deadline)

        def offer(peer: VerifiedPeer, hello: Hello) -> Message | None:
            claim()
            return own.offer(peer, hello)

        with (
            self._waiting.making(pipe.peer) as claim,
            DialersMemory(sock, self._transport, self._terms.host) as own,
        ):
            channel = dial(
                sock,
                self.credentials(),
                self._terms,
                pipe.peer,
                deadline,
                self._sessions,
                offer,
            )
            with channel.refusing():
                settled = own.settle(channel)
        return functools.partial(self._waiting.add, WaitingLink(channel, settled, dialer=True))

    def begin(self, sock: socket.socket) -> Incoming:
        terms = self._terms if self._exchange is None else self._exchange.terms
        return Incoming(sock, self.credentials, terms, self._sessions, self._terms_for)

    def _terms_for(self, hello: Hello) -> Terms | None:
        """The terms of the link for which this hello asks.

        None if they are not known yet: the peer may be a moment ahead, and the group, or what takes
        its pipes, does not exist here yet.
        """
        if hello.purpose == "form":
            return self._terms
        if not self._decided:
            return None
        if self._exchange is None:
            raise PeerUnreachable(f"for rank {self._terms.rank} the group does not exist")
        name = PipeName(hello.sender, hello.purpose, hello.lane)
        return self._exchange.terms_of(name) if self._exchange.has_owner(name) else None

    def admitted(self, incoming: Incoming) -> Serving:
        # Without the deadline of the group's formation: links are made long after it, and when an
        # attempt fails, the listener cuts its connections.
        incoming.allow_until(time.monotonic() + _ACCEPT_SECONDS)
        admitted: list[Hello] = []
        asked: list[tuple[Exchange, PipeName]] = []
        error: BaseException | None = None

        def admit(hello: Hello) -> None:
            if self._exchange is not None:
                if hello.purpose == "form":
                    raise PeerUnreachable("the group has formed without this connection")
                asked.append((self._exchange, self._exchange.admit(hello)))
                # The peer may have waited until the group existed here.
                incoming.allow_until(time.monotonic() + _ACCEPT_SECONDS)
                return
            self._waiting.admit(hello)
            admitted.append(hello)

        channel = None
        try:
            channel = yield from incoming.answering(admit)
            with channel.attributed():
                for exchange, pipe in asked:
                    return (yield from exchange.take(pipe, channel))
                settled = yield from settle_as_acceptor(channel, self._transport)
            self._waiting.require_open(channel.peer.rank)
            return functools.partial(self._waiting.add, WaitingLink(channel, settled, dialer=False))
        except BaseException as problem:
            error = problem
            if channel is not None:
                channel.link_keys.wipe()
            for hello in admitted:
                self._waiting.forget(hello)
            raise
        finally:
            for exchange, pipe in asked:
                exchange.settled(pipe, error)

    def refused(self, error: SealringError) -> None:
        """Notes a connection's error. It ends the set-up only if an admitted member disagrees."""
        if self._decided and isinstance(error, PeerUnreachable | GroupEnded):
            # If two members dial each other, one gives up, perhaps before it has proved anything.
            # A member that comes after the group has failed is told so.
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
