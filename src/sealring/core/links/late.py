"""Links that are made after the group has formed, when a program or a message first needs them.

A member knows from the group's formation who every member is and where it listens; the hello of
such a link states the group's transcript, and the member at the other end must be the very process
that signed it. Either end may dial. For a collective both ends need the link, and the higher rank
dials, or after seconds without it the lower one too; for a message the end that needs it does. It
is dialed until the call that needs the link ends, because a member may run no Python for minutes;
it is given up before only where no process listens any more or where the member refuses for good.

A group that has failed goes on listening until it is closed, and refuses with its failure: a member
without any other link to it learns of it in this way.
"""

from __future__ import annotations

import functools
import logging
import socket
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from sealring import _native
from sealring.core.handshake.channel import SecureChannel
from sealring.core.handshake.messages import Hello, Message
from sealring.core.handshake.peers import dial
from sealring.core.handshake.sessions import SessionTable
from sealring.core.handshake.terms import Terms
from sealring.core.identity.credentials import Credentials
from sealring.core.identity.verification import VerifiedPeer
from sealring.core.links.agreement import DialersMemory, Transport, settle_as_acceptor
from sealring.core.links.arrivals import HandOver, Serving
from sealring.core.links.dialer import Dialer
from sealring.core.links.forming import Agreed
from sealring.core.links.link import Link, link_of, prepare_socket, send_without_delay
from sealring.core.links.listener import Listener
from sealring.core.links.memory import SharedMemory
from sealring.core.links.rendezvous import Address
from sealring.core.links.threads import Job, borrow
from sealring.errors import (
    DuplicateRank,
    GroupEnded,
    GroupError,
    HandshakeError,
    MalformedSetup,
    NoLongerAdmitted,
    PeerUnreachable,
    SealringError,
)


class FormedGroup:
    """Every method may be called from any thread."""

    def __init__(
        self,
        credentials: Callable[[], Credentials],
        agreed: Agreed,
        transport: Transport,
        sessions: SessionTable,
        timeout: float,
    ) -> None:
        self.credentials = credentials
        """Asked for each link: by then the certificate may have been renewed."""
        self.agreed = agreed
        self.transport: Transport = transport
        self.sessions = sessions
        self.timeout = timeout
        """The group's, for those that wait for links outside of any call."""
        self.failure: GroupError | None = None
        """How the group has failed, if it has."""
        self.on_failure: Callable[[], None] | None = None
        """Called when it has."""
        self._process = _native.ProcessMark()

    @property
    def here(self) -> bool:
        """False in a forked child, where none of the threads exists."""
        return self._process.here

    def refuse_from_now(self, failure: GroupError) -> None:
        """Make no further link after the group has failed; members that want one are told so."""
        self.failure = self.failure or failure
        if self.on_failure is not None:
            self.on_failure()

    def require_alive(self, rank: int) -> None:
        if self.failure is not None:
            raise GroupEnded(f"the group of rank {rank} has failed", failure=self.failure)


_LOG = logging.getLogger("sealring")

_DIAL_SECONDS: Final = 30.0
_CLOSED_SECONDS: Final = 5.0
"""How long a member's machine refuses connections before the member is given up: it has ended."""

Rest = Callable[[], None]
"""Says to the peer of a link that came too late how its group has ended. It may take seconds."""
Deliver = Callable[[Link], Rest | None]
"""Takes a link, without waiting; returns what is left to do if its group has ended."""
Fail = Callable[[int, SealringError], None]
"""Ends the group: no link with this member could be made."""


class LinkSet:
    """Every method may be called from any thread."""

    def __init__(self, group: FormedGroup, terms: Terms, linked: Iterable[int]) -> None:
        self.terms = terms
        self.group = group
        self._lock = threading.Lock()
        self._linked = set(linked)
        """Members whose link is made, delivered or about to be."""
        self._wanted: set[int] = set()
        """Members that are dialed."""
        self._asked: set[int] = set()
        """Those of them that the group does not need: see `ask`."""
        self._accepting: Counter[int] = Counter()
        """Admitted connections of members that are not settled yet."""
        self._wanted_if_not_accepted: set[int] = set()
        self._attempted: set[int] = set()
        """Members that are connected to just now, to be linked with."""
        self._undelivered: list[Link] = []
        self._dismissing: list[Job] = []
        self._deliver: Deliver | None = None
        self._fail: Fail | None = None
        self._dialer = Dialer(
            _Book(group.agreed),
            self._on_connected,
            self.on_failed,
            _CLOSED_SECONDS,
            self._is_linked,
        )

    def attach(self, deliver: Deliver, fail: Fail) -> None:
        """Say where links go from now on; those that have come go there now."""
        with self._lock:
            self._deliver, self._fail = deliver, fail
            waiting, self._undelivered = self._undelivered, []
        for link in waiting:
            self._hand_over(link)

    def want(self, ranks: Iterable[int], after: float = 0.0) -> None:
        """Dial those of these members that there is no link with `after` seconds from now.

        Returns at once.
        """
        self._dial_missing(set(ranks), after, asked=False)

    def ask(self, ranks: Iterable[int]) -> None:
        """Dial these members too. One where no process answers ends nothing: it may have left.

        One that answers and makes no link ends the group as ever.
        """
        self._dial_missing(set(ranks), 0.0, asked=True)

    def _dial_missing(self, ranks: set[int], after: float, *, asked: bool) -> None:
        if not self.group.here:
            return
        with self._lock:
            missing = ranks - self._linked - self._wanted
            self._asked = self._asked | missing if asked else self._asked - ranks
            coming = {rank for rank in missing if self._accepting[rank]}
            self._wanted_if_not_accepted |= coming
            self._wanted |= missing - coming
        for rank in sorted(missing - coming):
            self._dialer.dial(rank, after)

    def _is_linked(self, rank: int) -> bool:
        with self._lock:
            return rank in self._linked

    def stop(self) -> None:
        self._dialer.stop()
        with self._lock:
            waiting, self._undelivered = self._undelivered, []
            dismissing, self._dismissing = self._dismissing, []
        for link in waiting:
            link.discard()
        for job in dismissing:
            job.join()

    # ---- the end that was dialed -----------------------------------------------------------------

    def admit(self, hello: Hello) -> None:
        """The last word on a verified member that wants a link."""
        rank = hello.sender
        if hello.instance != self.group.agreed.members[rank].instance:
            raise DuplicateRank(
                f"a second worker holds rank {rank}, on {hello.host}: the group was formed with "
                "another one"
            )
        self.group.require_alive(self.terms.rank)
        with self._lock:
            if rank in self._linked:
                raise PeerUnreachable(f"rank {rank} is linked already")
            if rank in self._attempted and rank < self.terms.rank:
                raise PeerUnreachable(f"rank {rank} is being dialed from here")
            self._accepting[rank] += 1

    def settled(self, hello: Hello) -> None:
        """A connection that was admitted is the link by now, or has failed."""
        rank = hello.sender
        with self._lock:
            self._accepting[rank] -= 1
            wanted = not self._accepting[rank] and rank in self._wanted_if_not_accepted
            if wanted:
                self._wanted_if_not_accepted.remove(rank)
            asked = rank in self._asked
        if wanted:
            self._dial_missing({rank}, 0.0, asked=asked)

    def take(self, channel: SecureChannel) -> Serving:
        """Settle the link. Its place is taken before the dialer is told that the link is made.

        After that nothing may fail: the dialer would wait for records of a link that is not there.
        """
        rank = channel.peer.rank
        reserved = False

        def reserve() -> None:
            nonlocal reserved
            self.group.require_alive(self.terms.rank)
            with self._lock:
                if rank in self._linked:
                    raise PeerUnreachable(f"rank {rank} is linked already")
                self._linked.add(rank)
            reserved = True

        try:
            self._check_process(channel.peer, channel.peer_hello)
            self._prepare(channel.socket)
            settled = yield from settle_as_acceptor(channel, self.group.transport, reserve)
        except BaseException:
            if reserved:
                with self._lock:
                    self._linked.remove(rank)
            raise
        return functools.partial(self.add, channel, settled.memory, dialer=False)

    # ---- the end that dials ----------------------------------------------------------------------

    def _on_connected(self, sock: socket.socket, rank: int) -> HandOver:
        with self._lock:
            if rank in self._linked:
                sock.close()
                return lambda: None
            if self._accepting[rank] and rank < self.terms.rank:
                raise PeerUnreachable(f"rank {rank} has connected itself", peer=rank)
            self._attempted.add(rank)
        try:
            return functools.partial(self.add, *self._set_up(sock, rank), dialer=True)
        except BaseException:
            with self._lock:
                self._attempted.discard(rank)
            raise

    def _set_up(self, sock: socket.socket, rank: int) -> tuple[SecureChannel, SharedMemory | None]:
        send_without_delay(sock)
        deadline = time.monotonic() + _DIAL_SECONDS
        own = self.group

        def offer(peer: VerifiedPeer, hello: Hello) -> Message | None:
            """After its accept a dialer does nothing that may fail."""
            self._check_process(peer, hello)
            self._prepare(sock)
            offered = memory.offer(peer, hello)
            self._dialer.let_finish(sock)
            return offered

        with DialersMemory(sock, own.transport, self.terms.host) as memory:
            channel = dial(sock, own.credentials(), self.terms, rank, deadline, own.sessions, offer)
            try:
                with channel.refusing():
                    settled = memory.settle(channel, bare_next=True)
            except BaseException:
                channel.link_keys.wipe()
                raise
        return channel, settled.memory

    def _prepare(self, sock: socket.socket) -> None:
        """Make it fit for records."""
        try:
            prepare_socket(sock)
        except OSError as problem:
            # Both ends try again: strangers who took all descriptors give them back.
            raise PeerUnreachable(
                f"rank {self.terms.rank} cannot make a link now: {problem.strerror}"
            ) from problem

    def _check_process(self, peer: VerifiedPeer, hello: Hello) -> None:
        """That it is the process with which the group was formed, by the key that it proved."""
        rank = peer.rank
        member = self.group.agreed.members[rank]
        if (peer.key, hello.instance) != (member.key, member.instance):
            raise DuplicateRank(
                f"another worker holds rank {rank} than the one with which the group was formed: "
                "two workers were started with one RANK, or it was started again"
            )

    def on_failed(self, error: SealringError) -> None:
        rank = error.met if isinstance(error, HandshakeError) else None
        rank = error.peer if isinstance(error, NoLongerAdmitted) else rank
        with self._lock:
            fail = self._fail
            if rank in self._linked:
                return
            if rank in self._asked and isinstance(error, PeerUnreachable):
                self._asked.remove(rank)
                self._wanted.discard(rank)
                return
        _LOG.warning("sealring: a link cannot be made: %s", str(error))
        if fail is not None:
            fail(self.terms.rank if rank is None else rank, error)

    # ---- both ------------------------------------------------------------------------------------

    def add(
        self,
        channel: SecureChannel,
        memory: SharedMemory | None,
        *,
        dialer: bool,
    ) -> None:
        link = link_of(channel, memory, None, dialer=dialer)
        with self._lock:
            # An acceptor has reserved the place. A dialer's peer that keeps to the rules above has
            # not made another link.
            second = dialer and link.peer in self._linked
            self._linked.add(link.peer)
            if dialer:
                self._attempted.discard(link.peer)
            if not second and self._deliver is None:
                self._undelivered.append(link)
                return
        if second:
            link.discard()
        else:
            self._hand_over(link)

    def _hand_over(self, link: Link) -> None:
        """Whatever fails here ends the group: the peer takes the link for made."""
        assert self._deliver is not None
        assert self._fail is not None
        try:
            rest = self._deliver(link)
            if rest is not None:
                self._dismiss(rest, link)
        except Exception as problem:
            # As a text: the frames of a traceback would keep the group.
            _LOG.error("sealring: a link cannot be taken: %s", traceback.format_exc())
            link.discard()
            why = f"rank {self.terms.rank} cannot take its link with rank {link.peer}: {problem!r}"
            self._fail(self.terms.rank, PeerUnreachable(why, peer=self.terms.rank))

    def _dismiss(self, rest: Rest, link: Link) -> None:
        if link.dialer:
            rest()
            return
        # Not on the thread that is here: it serves all listeners of the process.
        job = borrow("sealring-dismiss", rest)
        with self._lock:
            self._dismissing.append(job)


class _Book:
    """Addresses as the members themselves stated them."""

    def __init__(self, agreed: Agreed) -> None:
        self._agreed = agreed

    def lookup(self, rank: int) -> tuple[Address, ...]:
        try:
            return self._agreed.members[rank].addresses
        except MalformedSetup as error:
            raise MalformedSetup(
                f"rank {rank}'s statement: {error}", peer=rank, proven=True
            ) from None


class LateLinks:
    """Every method may be called from any thread."""

    def __init__(
        self, group: FormedGroup, terms: Terms, linked: Iterable[int], listener: Listener
    ) -> None:
        """`linked` are the members that there are links with for collectives."""
        self._group = group
        self.listener = listener
        self._stopping = threading.Lock()
        """Taken for good by the thread that stops all."""
        self._refusing = threading.Lock()
        """Taken for good by the thread that ends the dialing."""
        agreed = group.agreed
        formed = replace(
            terms,
            transcript=agreed.transcript.hex(),
            certificates=frozenset(each.certificate for each in agreed.members.values()),
        )
        self.collectives = LinkSet(group, formed, linked)
        self.messages = LinkSet(group, replace(formed, epoch=f"{terms.epoch}.messages"), ())
        group.on_failure = self._end_dialing_soon

    def kind_of(self, hello: Hello) -> LinkSet:
        return self.messages if hello.epoch == self.messages.terms.epoch else self.collectives

    def stop(self) -> None:
        """Make no further link, and end the threads. A forked child leaves its parent's alone."""
        if self._group.here:
            self._stop()

    def stop_soon(self) -> None:
        """The same in a thread of its own: the group was dropped, at any point of any thread."""
        self._in_a_thread(self._stop)

    def _end_dialing_soon(self) -> None:
        if not self._refusing.locked():
            self._in_a_thread(self._end_dialing)

    def _in_a_thread(self, job: Callable[[], None]) -> None:
        if self._group.here and not self._stopping.locked():
            try:
                threading.Thread(target=job, name="sealring-late-stop", daemon=True).start()
            except RuntimeError as problem:  # stop() does it when the group is closed
                _LOG.warning("sealring: a thread cannot be started: %s", problem)

    def _end_dialing(self) -> None:
        if self._refusing.acquire(blocking=False):
            for kind in (self.collectives, self.messages):
                kind.stop()

    def _stop(self) -> None:
        if self._stopping.acquire(blocking=False):
            self.listener.stop()
            self._end_dialing()
