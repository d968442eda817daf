"""All links of a group, or none: every pair connected, verified and ready.

Of each pair the higher rank dials. A link that has its keys waits under TLS until all of this
worker's links have; then each end says "ready" and to which processes it is linked. When it has
heard the same from all, the TLS connections are dropped and the bare sockets handed out. If
anything fails before, it is told over the links there are, and every worker that hears of it passes
it on: so all fail with one error.

Strangers cannot make it fail, nor can workers that are no longer admitted. What a connection does
whose peer is not admitted is logged, and remembered only to explain what is missing when the time
is up.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import socket
import time
from collections.abc import Mapping
from typing import Final

from sealring import _native
from sealring.errors import (
    ConfigurationError,
    DuplicateRank,
    HandshakeError,
    MalformedSetup,
    PeerUnreachable,
    SealringError,
)
from sealring.handshake.messages import Hello, digest, exactly
from sealring.handshake.peers import Incoming, dial
from sealring.handshake.sessions import SessionTable
from sealring.handshake.terms import Terms, workers_digest
from sealring.identity.credentials import Credentials
from sealring.limits import KEY_BYTES
from sealring.links.addresses import own_addresses
from sealring.links.agreement import Transport, settle_as_acceptor, settle_as_dialer
from sealring.links.diagnosis import time_is_up
from sealring.links.dialer import Dialer
from sealring.links.link import Link, prepare_socket, send_without_delay
from sealring.links.listener import HandOver, Listener
from sealring.links.rendezvous import Address, AddressBook, Store
from sealring.links.waiting import FAREWELL_SECONDS, WaitingLink, WaitingLinks

_LOG = logging.getLogger("sealring")

_ACCEPT_SECONDS: Final = 10.0
"""How long an admitted worker that dialed us may take to settle the link."""
_DIAL_SECONDS: Final = 30.0
"""Longer: a worker that many dial at once serves them in turn."""
_OWN_ADDRESS_SECONDS: Final = 1.0
_READY: Final = frozenset({"type", "workers"})


def build_mesh(
    store: Store,
    credentials: Credentials,
    terms: Terms,
    group_key: _native.Secret,
    *,
    timeout: float,
    transport: Transport = "auto",
    environ: Mapping[str, str] | None = None,
    objection: SealringError | None = None,
    sessions: SessionTable | None = None,
) -> list[Link]:
    """Connect this worker to every other member; returns its links in the order of their ranks.

    With a member that `sessions` has a session with, no TLS handshake is made.
    A worker that cannot take part comes all the same, with its `objection`: so all fail with that.
    """
    if transport not in ("auto", "tcp", "shm"):
        raise ConfigurationError(f"the transport {transport!r} is none of auto, tcp and shm")
    if len(group_key) != KEY_BYTES:
        raise ConfigurationError(f"a group key has {KEY_BYTES} bytes")
    if (credentials.job, credentials.rank) != (terms.job, terms.rank):
        raise ConfigurationError(
            f"the credentials are for rank {credentials.rank} of {credentials.job} and the terms "
            f"for rank {terms.rank} of {terms.job}"
        )
    if len(terms.members) == 1:
        if objection is not None:
            raise objection
        return []
    addresses = own_addresses(os.environ if environ is None else environ)
    book = AddressBook(store, terms.epoch)
    mesh = _Mesh(
        book, credentials, terms, group_key, timeout, transport, addresses, objection, sessions
    )
    return mesh.build()


class _Mesh:
    """One attempt. `build` runs on the caller's thread, the `_on_` methods on others."""

    def __init__(
        self,
        book: AddressBook,
        credentials: Credentials,
        terms: Terms,
        group_key: _native.Secret,
        timeout: float,
        transport: Transport,
        addresses: list[str],
        objection: SealringError | None,
        sessions: SessionTable | None,
    ) -> None:
        self._book = book
        self._sessions = sessions
        self._objection = objection
        self._credentials = credentials
        self._terms = terms
        self._group_key = group_key
        self._timeout = timeout
        self._transport: Transport = transport
        self._deadline = time.monotonic() + timeout
        self._lower = sorted(rank for rank in terms.members if rank < terms.rank)
        self._higher = sorted(rank for rank in terms.members if rank > terms.rank)
        self._next_own_check = time.monotonic() + _OWN_ADDRESS_SECONDS
        self._probing = False
        self._waiting = WaitingLinks(terms)
        self._workers = ""
        """Digest of the process of every rank, once no link is replaced any more."""
        self._dialer = Dialer(book, self._on_connected, self._waiting.fail)
        try:
            # No rank dials the highest one, so it does not listen.
            self._listener = Listener(
                addresses if self._higher else [],
                begin=lambda sock: Incoming(sock, credentials, terms, sessions),
                handle=self._on_admitted,
                refuse=self._on_refused,
            )
        except BaseException:
            os.close(self._waiting.wake)
            raise

    def build(self) -> list[Link]:
        try:
            self._run()
            self._stop()
            links = self._waiting.present()
            # All that can fail comes before the first socket is handed out.
            for link in links:
                self._prepare(link)
            return [link.link() for link in links]
        except BaseException as error:
            self._abort(error)
            raise
        finally:
            os.close(self._waiting.wake)

    def _run(self) -> None:
        self._listener.start()
        if self._higher:
            self._book.publish(self._terms.rank, self._listener.addresses)
        for rank in self._lower:
            self._dialer.dial(rank)
        while True:
            links = self._waiting.present()
            complete = len(links) == len(self._terms.members) - 1
            # Once this is said it holds: no link is replaced any more.
            if complete and self._waiting.close():
                if self._objection is not None:
                    raise self._objection
                links = self._waiting.present()
                self._workers = self._digest_of(links)
                for link in links:
                    ready = {"type": "ready", "workers": self._workers}
                    link.channel.send(ready, self._deadline)
            if complete:
                self._check_workers(links)
                if all(link.ready for link in links):
                    return
            if time.monotonic() >= self._deadline:
                raise self._time_is_up(links)
            for link in self._readable([link for link in links if not link.ready]):
                self._hear(link)
            if not complete:
                self._check_own_address()

    def _readable(self, links: list[WaitingLink]) -> list[WaitingLink]:
        """Wait until a link has something to say, something changes, or some time has passed."""
        poll = select.poll()
        poll.register(self._waiting.wake, select.POLLIN)
        for link in links:
            poll.register(link.channel.socket, select.POLLIN)
        remaining = min(self._deadline - time.monotonic(), _OWN_ADDRESS_SECONDS)
        events = dict(poll.poll(max(0.0, remaining) * 1000))
        if self._waiting.wake in events:
            os.eventfd_read(self._waiting.wake)
        return [link for link in links if link.channel.socket.fileno() in events]

    def _hear(self, link: WaitingLink) -> None:
        has_bytes = link.has_bytes()
        if has_bytes is None:
            self._lost(link)
        elif has_bytes:
            message = link.channel.receive(self._deadline)
            if message["type"] != "ready":
                raise MalformedSetup(
                    f"rank {link.rank} is out of step in set-up", peer=link.rank, proven=True
                )
            exactly(message, _READY)
            link.ready = digest(message, "workers")

    def _digest_of(self, links: list[WaitingLink]) -> str:
        instances = {link.rank: link.channel.peer_hello.instance for link in links}
        return workers_digest({self._terms.rank: self._terms.instance, **instances})

    def _check_workers(self, links: list[WaitingLink]) -> None:
        """That all are linked to the same processes.

        Where two workers hold one rank and connections are cut, a rank can be linked to one of them
        and the next rank to the other.
        """
        for link in links:
            if link.ready and link.ready != self._workers:
                raise DuplicateRank(
                    f"rank {link.rank} and rank {self._terms.rank} are linked to different workers "
                    "of one rank: two workers were started with one RANK, or an earlier run is "
                    "still alive",
                    peer=link.rank,
                    proven=True,
                )

    def _lost(self, link: WaitingLink) -> None:
        if not self._waiting.remove(link):
            raise PeerUnreachable(
                f"rank {link.rank} on {link.channel.peer_hello.host} went away while the others "
                "were getting ready: look at the error there",
                peer=link.rank,
                proven=True,
            )
        _LOG.warning("sealring: the connection to rank %d was cut in set-up", link.rank)
        if link.dialer:
            self._dialer.dial(link.rank)

    def _check_own_address(self) -> None:
        """Put our address back if the store shows another one, and look who answers there.

        Either a second worker has our rank, which it can prove, or the store is wrong. The address
        is corrected first, because a false one may lead to a server that answers slowly.
        """
        if not self._higher or time.monotonic() < self._next_own_check:
            return
        self._next_own_check = time.monotonic() + _OWN_ADDRESS_SECONDS
        found: tuple[Address, ...] = ()
        with contextlib.suppress(HandshakeError):
            found = self._book.lookup(self._terms.rank)
        if found == tuple(self._listener.addresses):
            return
        if not self._probing:
            _LOG.warning("sealring: the store shows another address for rank %d", self._terms.rank)
        with contextlib.suppress(PeerUnreachable):
            self._book.publish(self._terms.rank, self._listener.addresses)
        if not self._probing:
            self._probing = True  # one at a time: the store chooses how many addresses there are
            self._dialer.probe(self._terms.rank, found, self._on_probed)

    def _time_is_up(self, links: list[WaitingLink]) -> HandshakeError:
        linked = {link.rank for link in links}
        return time_is_up(
            missing=[rank for rank in (*self._lower, *self._higher) if rank not in linked],
            not_ready=[link.rank for link in links if not link.ready],
            timeout=self._timeout,
            own_addresses=self._listener.addresses,
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

    def _stop(self) -> None:
        self._waiting.close()
        self._dialer.stop()
        self._listener.stop()

    def _abort(self, error: BaseException) -> None:
        told = (
            error
            if isinstance(error, SealringError)
            else PeerUnreachable(f"rank {self._terms.rank} was stopped during set-up")
        )
        links = self._waiting.take_all(told)
        for link in links:
            self._waiting.tell(link)
        if not isinstance(told, PeerUnreachable) and time.monotonic() < self._deadline:
            self._stay_to_tell()
        self._stop()
        until = time.monotonic() + FAREWELL_SECONDS
        for link in links:
            link.discard(until)

    def _stay_to_tell(self) -> None:
        """Those that are still on their way here, or that we are still to dial, are told as well.

        Without this they would find no peer, and learn at their own timeout only that.
        """
        until = time.monotonic() + FAREWELL_SECONDS
        poll = select.poll()
        poll.register(self._waiting.wake, select.POLLIN)
        while not self._waiting.all_informed() and (left := until - time.monotonic()) > 0:
            if poll.poll(left * 1000):
                os.eventfd_read(self._waiting.wake)

    def _on_connected(self, sock: socket.socket, rank: int) -> HandOver:
        send_without_delay(sock)
        deadline = min(time.monotonic() + _DIAL_SECONDS, self._deadline)
        channel = dial(sock, self._credentials, self._terms, rank, deadline, self._sessions)
        with channel.refusing():
            settled = settle_as_dialer(channel, self._group_key, self._transport, self._terms.host)
        return functools.partial(self._waiting.add, WaitingLink(channel, settled, dialer=True))

    def _on_admitted(self, incoming: Incoming) -> HandOver | None:
        deadline = min(time.monotonic() + _ACCEPT_SECONDS, self._deadline)
        admitted: list[Hello] = []

        def admit(hello: Hello) -> None:
            self._waiting.admit(hello)
            admitted.append(hello)

        try:
            channel = incoming.finish(deadline, admit)
            with channel.refusing():
                settled = settle_as_acceptor(channel, self._group_key, self._transport)
            return functools.partial(self._waiting.add, WaitingLink(channel, settled, dialer=False))
        except SealringError as error:
            self._on_refused(error)
        except Exception as problem:
            # Whatever this is, the peer may have caused it, so it must not end the job.
            _LOG.exception("sealring: a connection was dropped")
            self._waiting.note_stranger(MalformedSetup(f"a connection was dropped: {problem!r}"))
        for hello in admitted:
            self._waiting.forget(hello)
        return None

    def _on_refused(self, error: SealringError) -> None:
        """Only a disagreement with an admitted member ends the set-up."""
        if isinstance(error, HandshakeError) and (
            not error.proven or isinstance(error, PeerUnreachable)
        ):
            self._waiting.note_stranger(error)
        else:
            self._waiting.fail(error)

    def _on_probed(self) -> None:
        self._probing = False
