"""A group forms, or does not: its first links, and what all members agree on.

Of each pair the higher rank dials. After seconds without a link the lower one dials too, for it may
be where no other host can dial in. A link that has its keys waits until all of this worker's first
links have; then the members agree along a tree over them (forming.py), and each end of a link says
the transcript of that ("ready"). If anything fails before, it is told over the links there are, and
every worker that hears of it passes it on: so all fail with one error. After it nothing but records
follows on a link, and a neighbour that is lost is lost to a group that exists. When all have said
the same, or are lost, the bare sockets are handed out. Other pipes are opened later (exchange.py).
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from sealring.core.handshake.sessions import SessionTable
from sealring.core.handshake.terms import PipeName, Terms
from sealring.core.identity.credentials import PEER_EVIDENCE, Credentials, kept_for_later
from sealring.core.links.addresses import Reach, read_reach
from sealring.core.links.agreement import Transport
from sealring.core.links.connections import FAREWELL_SECONDS, Connections, WaitingLink, WaitingLinks
from sealring.core.links.diagnosis import time_is_up
from sealring.core.links.dialer import LOOK_SECONDS, Dialer, OwnAddress, note_reached
from sealring.core.links.exchange import Exchange
from sealring.core.links.forming import (
    Agreed,
    Conversation,
    agree,
    agreed_alone,
    first_links,
)
from sealring.core.links.link import Link, link_of, prepare_socket
from sealring.core.links.listener import Listener
from sealring.core.links.rendezvous import AddressBook, Store, encode_addresses
from sealring.core.links.settling import Settling
from sealring.core.links.threads import AtWork
from sealring.errors import (
    ConfigurationError,
    HandshakeError,
    PeerUnreachable,
    SealringError,
)

_LOG = logging.getLogger("sealring")

_READ_SECONDS: Final = 0.25
"""How long refused members have to read why. They may keep the connection to tell others first."""
_LOWER_DIALS_SECONDS: Final = 3.0
"""How long the lower of two ranks waits for the higher one's connection before it dials too."""
_WITNESS_SECONDS: Final = 2.0
"""How much longer than the timeout a member waits at most to hear which one does not answer."""


@dataclass(frozen=True, slots=True)
class Mesh:
    links: list[Link]
    """The first ones, in the order of their ranks."""
    agreed: Agreed
    exchange: Exchange | None
    """Opens all other pipes; None in a group of one."""
    sparse: bool
    """Not all pairs are linked."""

    @contextmanager
    def handed_over(self) -> Iterator[None]:
        """Make the engine in this block. If that fails the links are closed: the peers see it."""
        try:
            yield
        except BaseException:
            for link in self.links:
                link.discard()
            if self.exchange is not None:
                self.exchange.stop()
            raise


def build_mesh(
    store: Store,
    credentials: Credentials,
    terms: Terms,
    *,
    timeout: float,
    transport: Transport = "auto",
    environ: Mapping[str, str] | None = None,
    sessions: SessionTable | None = None,
    current: Callable[[], Credentials] | None = None,
) -> Mesh:
    """Form the group.

    `current` gives the credentials for each link: the certificate may have been renewed while this
    worker waited for others, or since the group formed. With a member that `sessions` has a
    session with, no TLS handshake is made.
    """
    if transport not in ("auto", "tcp", "shm"):
        raise ConfigurationError(f"the transport {transport!r} is none of auto, tcp and shm")
    if (credentials.job, credentials.rank) != (terms.job, terms.rank):
        raise ConfigurationError(
            f"the credentials are for rank {credentials.rank} of {credentials.job} and the terms "
            f"for rank {terms.rank} of {terms.job}"
        )
    if len(terms.members) == 1:
        return Mesh([], agreed_alone(credentials, terms), None, sparse=False)
    reach = read_reach(os.environ if environ is None else environ)
    mesh = MeshAttempt(
        store,
        terms,
        timeout,
        transport,
        reach,
        SessionTable() if sessions is None else sessions,
        current or kept_for_later(credentials, terms.world),
    )
    with AtWork():
        return mesh.build()


class MeshAttempt:
    """One attempt, on the caller's thread."""

    def __init__(
        self,
        store: Store,
        terms: Terms,
        timeout: float,
        transport: Transport,
        reach: Reach,
        sessions: SessionTable,
        current: Callable[[], Credentials],
    ) -> None:
        self._sessions = sessions
        self._terms = terms
        self._timeout = timeout
        self._transport: Transport = transport
        self.deadline = time.monotonic() + timeout
        # Where peers show evidence, each member must see every other's.
        everybody = bool(terms.settings.get(PEER_EVIDENCE))
        first = first_links(terms.members, terms.rank, everybody=everybody)
        self._lower = sorted(rank for rank in first if rank < terms.rank)
        self._higher = sorted(rank for rank in first if rank > terms.rank)
        self._sparse = len(first) < len(terms.members) - 1
        self._settling = Settling(terms, self.deadline, sparse=self._sparse)
        self._current = current
        self._exchange: Exchange | None = None
        self._waiting = WaitingLinks(terms)
        self._cut: set[int] = set()
        """Neighbours whose link was cut before this worker's first links were there."""
        self._polled: list[WaitingLink] | None = None
        self._poll = select.poll()
        """Of these links, until there are others."""
        self._by_descriptor: dict[int, WaitingLink] = {}
        self._connections = Connections(
            current, terms, transport, sessions, self._waiting, self.deadline
        )
        self._book = book = AddressBook(store, terms.epoch, self.deadline)
        self._dialer = Dialer(
            book,
            self._connections.dialed,
            lambda _, error: self._waiting.fail(error),
            settled=lambda pipe: self._waiting.is_linked(pipe.peer),
        )
        try:
            self._listener = Listener(
                reach.hosts,
                begin=self._connections.begin,
                handle=self._connections.admitted,
                refuse=self._connections.refused,
                ports=reach.ports,
            )
        except BaseException:
            self._waiting.release()
            raise
        note_reached(reach.hosts)
        self._addresses = reach.announced(self._listener.addresses)
        self._own_address = OwnAddress(book, terms.rank, self._addresses, self._dialer)

    def build(self) -> Mesh:
        try:
            links, agreed = self._run()
            self._settling.check_ready(links)
            # All that can fail comes before the first "ready": after it the group exists.
            for link in links:
                self._prepare(link)
            keys = [agreed.group_key(link.rank) for link in links]
            self._stop_dialing()
            self._exchange = Exchange(
                self._current,
                agreed,
                self._terms,
                self._transport,
                self._sessions,
                self._listener,
                [link.rank for link in links],
                sparse=self._sparse,
            )
            self._decide()
            self._settling.say_ready(links)
            self._await_ready(links)
            made = [
                link_of(link.channel, link.settled.memory, key, dialer=link.dialer)
                for link, key in zip(links, keys, strict=True)
            ]
            return Mesh(made, agreed, self._exchange, sparse=self._sparse)
        except BaseException as error:
            self._decide()
            self.abort(error)
            raise
        finally:
            self._waiting.release()

    def _run(self) -> tuple[list[WaitingLink], Agreed]:
        """Until the members have agreed."""
        self._listener.start()
        if self._higher:
            self._own_address.publish()
        lower_ends_dial = time.monotonic() + _LOWER_DIALS_SECONDS
        self._dial(self._lower)
        self._settling.start(self._conversation())
        while True:
            links = self._waiting.present()
            complete = len(links) == len(self._lower) + len(self._higher)
            may_close = complete and self._settling.may_close
            if may_close and (cut := [link for link in links if link.has_bytes() is None]):
                self._lost(cut[0])
                continue
            # Once this is said it holds: no link is replaced any more.
            if may_close and self._waiting.close():
                links = self._waiting.present()
                self._settling.say_linked(links)
            if (agreed := self._settling.agreed) is not None:
                return links, agreed
            until = self.deadline
            if complete and time.monotonic() + LOOK_SECONDS >= until:
                until += self._longer()
            if time.monotonic() >= until:
                raise self._time_is_up(links)
            for link, is_cut in self._readable([link for link in links if not link.ready], until):
                self._hear(link, is_cut=is_cut)
                if self._settling.agreed is not None:
                    break
            if not complete:
                self._own_address.check()
                if time.monotonic() >= lower_ends_dial:
                    self._dial(self._higher)

    def _dial(self, ranks: Iterable[int]) -> None:
        """Those with which there is no link, and that are not dialed already."""
        for rank in ranks:
            if self._waiting.dial(rank):
                self._dialer.dial(PipeName(rank))

    def _await_ready(self, links: list[WaitingLink]) -> None:
        """The group exists here, with all members or with some that are lost to it."""
        while waiting := [link for link in links if not (link.ready or link.lost)]:
            heard = self._readable(waiting, self.deadline)
            # What has come counts, also if it came while this worker waited for another.
            if not heard and time.monotonic() >= self.deadline:
                for link in waiting:
                    self._settling.lose(link, "it did not say that it is ready in time")
                return
            for link, is_cut in heard:
                if is_cut:
                    self._settling.lose(link, "its connection was cut")
                else:
                    self._settling.hear_ready(link)

    def _longer(self) -> float:
        """A neighbour that is nearer to the one that all wait for names it first, and tells."""
        return _WITNESS_SECONDS * self._settling.exchange.timeout_weight()

    def _readable(self, links: list[WaitingLink], until: float) -> list[tuple[WaitingLink, bool]]:
        """Wait until a link has something to say, something changes, or some time has passed.

        Returns the links that have, and whether that is the end of the connection.
        """
        if links != self._polled:
            self._polled = links
            self._poll = select.poll()
            self._poll.register(self._waiting.wake, select.POLLIN)
            self._by_descriptor = {link.channel.socket.fileno(): link for link in links}
            for descriptor in self._by_descriptor:
                self._poll.register(descriptor, select.POLLIN | select.POLLRDHUP)
        remaining = min(until - time.monotonic(), LOOK_SECONDS)
        heard = []
        for descriptor, event in self._poll.poll(max(0.0, remaining) * 1000):
            if descriptor == self._waiting.wake:
                os.eventfd_read(descriptor)
                continue
            link = self._by_descriptor[descriptor]
            # What a peer said before it ended its direction is still to be read.
            heard.append((link, event != select.POLLIN and link.has_bytes() is None))
        return heard

    def _hear(self, link: WaitingLink, *, is_cut: bool) -> None:
        if is_cut:
            self._lost(link)
        else:
            self._settling.hear(link)

    def _conversation(self) -> Conversation:
        return agree(
            self._connections.credentials,
            self._terms,
            encode_addresses(self._addresses).encode(),
            self._settling.proven,
            self._sessions.certificates,
            sparse=self._sparse,
        )

    def _lost(self, link: WaitingLink) -> None:
        # A peer that has said that its links are there makes no new link in this attempt.
        if link.closed or not self._waiting.remove(link):
            self._waiting.mark_informed(link.rank)  # there is no one left to tell
            raise PeerUnreachable(
                f"rank {link.rank} on {link.channel.peer_hello.host} went away while the others "
                "were getting ready: look at the error there",
                peer=link.rank,
                proven=True,
            )
        # One line for each neighbour: it may cut its link again and again.
        level = logging.DEBUG if link.rank in self._cut else logging.WARNING
        self._cut.add(link.rank)
        _LOG.log(level, "sealring: the connection to rank %d was cut in set-up", link.rank)
        self._dial(self._lower)

    def _time_is_up(self, links: list[WaitingLink]) -> HandshakeError:
        linked = {link.rank for link in links}
        return time_is_up(
            missing=[rank for rank in (*self._lower, *self._higher) if rank not in linked],
            awaited=self._settling.exchange.awaited(),
            timeout=self._timeout,
            own_addresses=self._addresses,
            problems=self._dialer.problems,
            strangers=self._waiting.strangers(),
        )

    def _prepare(self, link: WaitingLink) -> None:
        try:
            prepare_socket(link.channel.socket)
        except OSError as problem:
            raise PeerUnreachable(
                f"the connection to rank {link.rank} broke at the end of set-up: {problem}",
                peer=link.rank,
                proven=True,
            ) from problem

    def _decide(self) -> None:
        self._connections.decide(self._exchange)
        self._listener.look_again()

    def _stop(self, until: float = 0.0) -> None:
        """Those that were refused have until then to read why."""
        self._waiting.close()
        self._stop_dialing()
        self._listener.stop(until)

    def _stop_dialing(self) -> None:
        self._book.close()
        self._dialer.stop()

    def abort(self, error: BaseException) -> None:
        told = (
            error
            if isinstance(error, SealringError)
            else PeerUnreachable(f"rank {self._terms.rank} was stopped during set-up")
        )
        links = self._waiting.take_all(told)
        self._waiting.tell(links)
        # An interrupted worker ends at once; after the time is up no other worker comes.
        if told is error and time.monotonic() < self.deadline:
            links += self.stay_to_tell()
        self._stop(time.monotonic() + _READ_SECONDS)
        links += self._told_newcomers()
        if self._exchange is not None:
            self._exchange.stop()
        until = time.monotonic() + FAREWELL_SECONDS
        for link in links:
            link.discard(until)

    def stay_to_tell(self) -> list[WaitingLink]:
        """Those that are still on their way here, or that we are still to dial, are told as well.

        Without this they would find no peer, and learn at their own timeout only that. Returns
        their links.
        """
        links: list[WaitingLink] = []
        until = time.monotonic() + FAREWELL_SECONDS
        poll = select.poll()
        poll.register(self._waiting.wake, select.POLLIN)
        neighbours = {*self._lower, *self._higher}
        while not self._waiting.are_informed(neighbours) and (left := until - time.monotonic()) > 0:
            if poll.poll(left * 1000):
                os.eventfd_read(self._waiting.wake)
            links += self._told_newcomers()
        return links

    def _told_newcomers(self) -> list[WaitingLink]:
        links = self._waiting.take_newcomers()
        self._waiting.tell(links)
        return links
