"""The exchange that opens every pipe of a group once it has formed.

A pipe carries records between two members, for a purpose (collectives or messages), in a lane; the
first lane is number 0. Its name is in the hello with which one end asks for it, and in the hello
with which the other end answers; so the pipe's keys are of this name alone.

A member knows from the group's formation who every member is and where it listens. The hello states
the group's transcript, and the member at the other end must be the very process that signed it.
Either end may dial. For a collective both ends need the pipe, and the higher rank dials, or after
seconds without it the lower one too; for a message the end that needs it does. It is dialed until
the call that needs the pipe ends, because a member may run no Python for minutes; it is given up
before only where no process listens any more or where the member refuses for good.

Some pipes are opened by agreement: further lanes, when the ranks have agreed on their number
(core/engine/lanes.py), and the pipes for messages of a group whose pairs are all linked, when it is
made. Both ends wait for these, dial as for a collective, and take none that they have not agreed
to. One that cannot be opened is given up by both ends, with one reason.

A group that has failed goes on listening until it is closed, and refuses with its failure: a member
without any other pipe to it learns of it in this way.
"""

from __future__ import annotations

import functools
import logging
import socket
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from typing import Final

from sealring import _native
from sealring.core.handshake.channel import SecureChannel
from sealring.core.handshake.messages import Hello, Message
from sealring.core.handshake.peers import dial
from sealring.core.handshake.sessions import SessionTable
from sealring.core.handshake.terms import PipeName, Purpose, Terms
from sealring.core.identity.credentials import Credentials
from sealring.core.identity.verification import VerifiedPeer
from sealring.core.links.agreement import DialersMemory, Transport, settle_as_acceptor
from sealring.core.links.arrivals import HandOver
from sealring.core.links.dialer import Dialer
from sealring.core.links.forming import Agreed
from sealring.core.links.link import Link, link_of, prepare_socket, send_without_delay
from sealring.core.links.listener import Listener
from sealring.core.links.memory import SharedMemory
from sealring.core.links.pipes import Pipes
from sealring.core.links.rendezvous import Address
from sealring.core.links.threads import Job, borrow
from sealring.errors import (
    DuplicateRank,
    GroupError,
    HandshakeError,
    MalformedSetup,
    NoLongerAdmitted,
    PeerUnreachable,
    SealringError,
    Unsupported,
)

_LOG = logging.getLogger("sealring")

_DIAL_SECONDS: Final = 30.0
_CLOSED_SECONDS: Final = 5.0
"""How long a member's machine refuses connections before the member is given up: it has ended."""

OTHER_END_SECONDS: Final = 5.0
"""How long the lower of two ranks that both need a pipe waits before it dials too. Where machines
are busy, the pipes of a large group take seconds, and twice as many connections would make it
worse."""

_READ_SECONDS: Final = 0.25
"""How long a member that was refused just now has to read why."""

Rest = Callable[[], None]
"""Says to the peer of a pipe that came too late how its group has ended. It may take seconds."""
Deliver = Callable[[Link], Rest | None]
"""Takes a pipe, without waiting; returns what is left to do if its group has ended."""
Fail = Callable[[int, SealringError], None]
"""Ends the group: no pipe to this member could be opened."""


@dataclass(slots=True, eq=False)
class _Owner:
    """What gets the first lane's pipes of one purpose."""

    deliver: Deliver
    fail: Fail


class Exchange:
    """Every method may be called from any thread."""

    def __init__(
        self,
        credentials: Callable[[], Credentials],
        agreed: Agreed,
        terms: Terms,
        transport: Transport,
        sessions: SessionTable,
        listener: Listener,
        linked: Iterable[int],
        *,
        sparse: bool,
    ) -> None:
        """`credentials` are asked for each pipe: by then the certificate may have been renewed.

        `linked` are the members to which there is a pipe for collectives; `sparse` says that these
        are not all.
        """
        self._credentials = credentials
        self.agreed = agreed
        self.terms = replace(
            terms,
            transcript=agreed.transcript.hex(),
            certificates=frozenset(each.certificate for each in agreed.members.values()),
            purpose="collectives",
        )
        self._transport: Transport = transport
        self._sessions = sessions
        self.listener = listener
        self._process = _native.ProcessMark()
        self.pipes = Pipes(terms.rank, linked, sparse=sparse)
        self._owners: dict[Purpose, _Owner] = {}
        self._dismissing: list[Job] = []
        self._stopping = threading.Lock()
        """Taken for good by the thread that stops all."""
        self._dialers: dict[Purpose, Dialer] = {
            "collectives": self._new_dialer(),
            "messages": self._new_dialer(),
        }
        """Each has its own threads: members that do not answer messages hold up no collective."""

    def _new_dialer(self) -> Dialer:
        return Dialer(
            _Book(self.agreed),
            self._on_connected,
            self.on_failed,
            _CLOSED_SECONDS,
            self.pipes.is_settled,
        )

    @property
    def rank(self) -> int:
        """This worker's, in the job."""
        return self.terms.rank

    def terms_of(self, name: PipeName) -> Terms:
        """What both ends of this pipe must say."""
        return replace(self.terms, purpose=name.purpose, lane=name.lane)

    def attach(self, purpose: Purpose, deliver: Deliver, fail: Fail) -> None:
        """Say where pipes of a purpose go; members that have asked for one are answered now."""
        self._owners[purpose] = _Owner(deliver, fail)
        self.listener.look_again()

    def has_owner(self, name: PipeName) -> bool:
        """Whether there is something to give the pipe to. Until then its hello waits."""
        return self.pipes.failed or self.pipes.by_agreement(name) or name.purpose in self._owners

    def refuse_from_now(self, failure: GroupError) -> None:
        """Open no further pipe after the group has failed; members that want one are told so."""
        if not self._process.here:
            return  # in a forked child the lock may be held for ever
        self.pipes.fail(failure)
        for dialer in self._dialers.values():
            dialer.break_off()

    def stop(self) -> None:
        """Open no further pipe, and end the threads. A forked child leaves its parent's alone."""
        if self._process.here:
            self._stop()

    def stop_soon(self) -> None:
        """Like `stop`, in a thread of its own: the group was dropped, on any thread."""
        if self._process.here and not self._stopping.locked():
            try:
                threading.Thread(target=self._stop, name="sealring-late-stop", daemon=True).start()
            except RuntimeError as problem:  # stop() does it when the group is closed
                _LOG.warning("sealring: a thread cannot be started: %s", problem)

    def _stop(self) -> None:
        if not self._stopping.acquire(blocking=False):
            return
        self.listener.stop(time.monotonic() + _READ_SECONDS)
        self.pipes.close()
        for dialer in self._dialers.values():
            dialer.stop()
        for job in self._dismissing:
            job.join()

    # ---- which pipes there are to be -------------------------------------------------------------

    def want(self, purpose: Purpose, ranks: Iterable[int], after: float = 0.0) -> None:
        """Dial those of these members to which there is no pipe `after` seconds from now.

        Returns at once.
        """
        for rank in sorted(ranks):
            self._dial(PipeName(rank, purpose), after)

    def ask(self, purpose: Purpose, ranks: Iterable[int]) -> None:
        """Dial these members too. One where no process answers ends nothing: it may have left.

        If a member answers and refuses, the group fails.
        """
        for rank in sorted(ranks):
            self._dial(PipeName(rank, purpose), optional=True)

    def _dial(self, name: PipeName, after: float = 0.0, *, optional: bool = False) -> None:
        if self._process.here and self.pipes.want(name, optional=optional):
            self._dialers[name.purpose].dial(name, after)

    def _dial_agreed(self, name: PipeName) -> None:
        """The higher rank at once, and the lower one later.

        By then the higher one may have given the pipe up or ended: it is learnt by dialing it.
        """
        self._dial(name, 0.0 if name.peer < self.rank else OTHER_END_SECONDS)

    def open_agreed(
        self, names: Iterable[PipeName], within_s: float, objection: str = ""
    ) -> list[Link]:
        """Opens pipes to which the members at both ends agree just now.

        The links are in the order of their lanes, and the caller's. If one of them is not opened in
        this time, cannot be, or if either end has an `objection`, of which the other hears, the
        error says so. Then none is opened later either.
        """
        deadline = time.monotonic() + within_s
        call = self.pipes.agree(names, objection)
        try:
            # One lane of a pair after the other: a member may open few connections at once.
            for name in sorted(name for name in call.missing if name.lane < 2):
                self._dial_agreed(name)
            self.pipes.await_all(call, deadline)
        except BaseException as error:
            stopped = PeerUnreachable(f"rank {self.rank} was stopped")
            self.pipes.give_up(error if isinstance(error, SealringError) else stopped)
            for link in call.links:
                link.discard()
            raise
        finally:
            self.pipes.end_agreement()
        return sorted(call.links, key=lambda link: link.lane)

    # ---- the end that was dialed -----------------------------------------------------------------

    def admit(self, hello: Hello) -> PipeName:
        """Final admission check of a verified member that asks for a pipe."""
        name = PipeName(hello.sender, hello.purpose, hello.lane)
        if hello.instance != self.agreed.members[name.peer].instance:
            raise DuplicateRank(
                f"a second worker holds rank {name.peer}, on {hello.host}: the group was formed "
                "with another one"
            )
        self.pipes.admit(name)
        return name

    def settled(self, name: PipeName, error: BaseException | None) -> None:
        """A connection that was admitted is the pipe by now, or has failed with this error."""
        if self.pipes.settled(name, error):
            self._dialers[name.purpose].dial(name)

    def take(self, name: PipeName, channel: SecureChannel) -> Generator[None, None, HandOver]:
        """Settle the pipe. Its place is taken before the dialer is told that the pipe is open.

        After that nothing may fail: the dialer would wait for records of a pipe that is not there.
        """
        reserved: list[PipeName] = []

        def reserve() -> None:
            self.pipes.reserve(name)
            reserved.append(name)

        try:
            self._check_process(channel.peer, channel.peer_hello)
            self._prepare(channel.socket)
            settled = yield from settle_as_acceptor(channel, self._transport, reserve)
        except BaseException:
            for each in reserved:
                self.pipes.release(each)
            raise
        return functools.partial(self.add, channel, settled.memory, dialer=False)

    # ---- the end that dials ----------------------------------------------------------------------

    def _on_connected(self, sock: socket.socket, name: PipeName) -> HandOver:
        if not self.pipes.connected(name):
            sock.close()
            return lambda: None
        try:
            return functools.partial(self.add, *self.set_up(sock, name), dialer=True)
        except BaseException:
            self.pipes.not_connected(name)
            raise

    def set_up(
        self, sock: socket.socket, name: PipeName
    ) -> tuple[SecureChannel, SharedMemory | None]:
        send_without_delay(sock)
        deadline = time.monotonic() + _DIAL_SECONDS

        def offer(peer: VerifiedPeer, hello: Hello) -> Message | None:
            """After its accept a dialer does nothing that may fail."""
            self._check_process(peer, hello)
            self.pipes.require_wanted(name)
            self._prepare(sock)
            offered = memory.offer(peer, hello)
            self._dialers[name.purpose].let_finish(sock)
            return offered

        terms = self.terms_of(name)
        with DialersMemory(sock, self._transport, terms.host) as memory:
            channel = dial(
                sock, self._credentials(), terms, name.peer, deadline, self._sessions, offer
            )
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
                f"rank {self.rank} cannot make a link now: {problem.strerror}"
            ) from problem

    def _check_process(self, peer: VerifiedPeer, hello: Hello) -> None:
        """That it is the process with which the group was formed, by the key that it proved."""
        rank = peer.rank
        member = self.agreed.members[rank]
        if (peer.key, hello.instance) != (member.key, member.instance):
            raise DuplicateRank(
                f"another worker holds rank {rank} than the one with which the group was formed: "
                "two workers were started with one RANK, or it was started again"
            )

    def on_failed(self, name: PipeName, error: SealringError) -> None:
        rank = error.met if isinstance(error, HandshakeError) else None
        rank = error.peer if isinstance(error, NoLongerAdmitted) else rank
        rank = error.told_by if isinstance(error, Unsupported) else rank
        if not self.pipes.is_missed(name, error):
            return
        _LOG.warning("sealring: a link cannot be made: %s", str(error))
        if self.pipes.by_agreement(name):
            if not self.pipes.objection_told(name):
                self.pipes.give_up(error)
        elif (owner := self._owners.get(name.purpose)) is not None:
            owner.fail(self.rank if rank is None else rank, error)

    # ---- both ------------------------------------------------------------------------------------

    def add(self, channel: SecureChannel, memory: SharedMemory | None, *, dialer: bool) -> None:
        link = link_of(channel, memory, None, dialer=dialer)
        name = PipeName(link.peer, link.purpose, link.lane)
        if not self.pipes.opened(name, dialer=dialer):
            link.discard()
        elif self.pipes.by_agreement(name):
            awaited, following = self.pipes.take_awaited(name, link)
            if not awaited:
                link.discard()
            elif following is not None:
                self._dial_agreed(following)
        else:
            self._hand_over(link)

    def _hand_over(self, link: Link) -> None:
        """Whatever fails here ends the group: the peer takes the pipe for open."""
        owner = self._owners[link.purpose]
        try:
            rest = owner.deliver(link)
            if rest is not None:
                self._dismiss(rest, link)
        except Exception as problem:
            # As a text: the frames of a traceback would keep the group.
            _LOG.error("sealring: a link cannot be taken: %s", traceback.format_exc())
            link.discard()
            why = f"rank {self.rank} cannot take its link with rank {link.peer}: {problem!r}"
            owner.fail(self.rank, PeerUnreachable(why, peer=self.rank))

    def _dismiss(self, rest: Rest, link: Link) -> None:
        if link.dialer:
            rest()
            return
        # Not on the thread that is here: it serves all listeners of the process.
        self._dismissing.append(borrow("sealring-dismiss", rest))


class _Book:
    """Addresses as the members themselves stated them."""

    def __init__(self, agreed: Agreed) -> None:
        self.agreed = agreed

    def lookup(self, rank: int) -> tuple[Address, ...]:
        try:
            return self.agreed.members[rank].addresses
        except MalformedSetup as error:
            raise MalformedSetup(
                f"rank {rank}'s statement: {error}", peer=rank, proven=True
            ) from None
