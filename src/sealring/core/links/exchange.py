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
class _Pipe:
    """One pipe, from the moment that an end asks for it. Read and changed under the lock."""

    name: PipeName
    open: bool = False
    """It is made: delivered, or about to be."""
    wanted: bool = False
    """It is dialed, or will be if the connection that is being accepted fails."""
    optional: bool = False
    """The group does without it if no process answers: see `ask`."""
    accepting: int = 0
    """Admitted connections of the peer for it that are not settled yet."""
    postponed: bool = False
    """It is dialed if none of those becomes the pipe."""
    connected: bool = False
    """This end has connected to the peer for it just now."""
    given_up: str = ""
    """Why it is not opened any more, though it was agreed on."""


@dataclass(slots=True, eq=False)
class _Owner:
    """What gets the first lane's pipes of one purpose."""

    deliver: Deliver
    fail: Fail


class _Agreement:
    """Pipes that this end has agreed to and waits for. Changed under the lock."""

    def __init__(self, names: Iterable[PipeName], objection: str) -> None:
        self.missing = set(names)
        self.links: list[Link] = []
        self.objection = objection
        """Why this end opens none of them. Then those are missing whose peers were not told."""
        self.problem: SealringError | None = None
        """Why they will not all come."""


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
        self._sparse = sparse
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
        self._failure: GroupError | None = None
        self._changed = threading.Condition()
        self.pipes: dict[PipeName, _Pipe] = {}
        for rank in linked:
            self._pipe(PipeName(rank, "collectives")).open = True
        self._awaited: _Agreement | None = None
        self._owners: dict[Purpose, _Owner] = {}
        self._undelivered: list[Link] = []
        self._dismissing: list[Job] = []
        self._stopping = threading.Lock()
        """Taken for good by the thread that stops all."""
        self._refusing = threading.Lock()
        """Taken for good by the thread that ends the dialing."""
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
            self._is_settled,
        )

    @property
    def rank(self) -> int:
        """This worker's, in the job."""
        return self.terms.rank

    def terms_of(self, name: PipeName) -> Terms:
        """What both ends of this pipe must say."""
        return replace(self.terms, purpose=name.purpose, lane=name.lane)

    def attach(self, purpose: Purpose, deliver: Deliver, fail: Fail) -> None:
        """Say where pipes of a purpose go from now on; those that have come go there now."""
        with self._changed:
            self._owners[purpose] = _Owner(deliver, fail)
            waiting = [link for link in self._undelivered if link.purpose == purpose]
            self._undelivered = [link for link in self._undelivered if link.purpose != purpose]
        for link in waiting:
            self._hand_over(link)

    def refuse_from_now(self, failure: GroupError) -> None:
        """Open no further pipe after the group has failed; members that want one are told so."""
        if not self._process.here:
            return  # in a forked child the lock may be held for ever
        self._failure = self._failure or failure
        self._give_up(GroupEnded(f"the group of rank {self.rank} has failed", failure=failure))
        if not self._refusing.locked():
            self._in_a_thread(self._end_dialing)

    def stop(self) -> None:
        """Open no further pipe, and end the threads. A forked child leaves its parent's alone."""
        if self._process.here:
            self._stop()

    def stop_soon(self) -> None:
        """Like `stop`, in a thread of its own: the group was dropped, on any thread."""
        self._in_a_thread(self._stop)

    def _in_a_thread(self, job: Callable[[], None]) -> None:
        if self._process.here and not self._stopping.locked():
            try:
                threading.Thread(target=job, name="sealring-late-stop", daemon=True).start()
            except RuntimeError as problem:  # stop() does it when the group is closed
                _LOG.warning("sealring: a thread cannot be started: %s", problem)

    def _stop(self) -> None:
        if self._stopping.acquire(blocking=False):
            self.listener.stop(time.monotonic() + _READ_SECONDS)
            self._end_dialing()

    def _end_dialing(self) -> None:
        if not self._refusing.acquire(blocking=False):
            return
        self._give_up(PeerUnreachable(f"rank {self.rank} has closed its group"))
        for dialer in self._dialers.values():
            dialer.stop()
        with self._changed:
            waiting, self._undelivered = self._undelivered, []
            dismissing, self._dismissing = self._dismissing, []
        for link in waiting:
            link.discard()
        for job in dismissing:
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
        if not self._process.here:
            return
        with self._changed:
            pipe = self._pipe(name)
            dialed_already = pipe.open or pipe.wanted or bool(pipe.given_up)
            if not optional or not dialed_already:
                pipe.optional = optional
            if dialed_already:
                return
            pipe.wanted, pipe.postponed = True, pipe.accepting > 0
            if pipe.postponed:
                return
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
        call = _Agreement(names, objection)
        deadline = time.monotonic() + within_s
        # One lane of a pair after the other: a member may open few connections at once.
        first = [name for name in sorted(call.missing) if name.lane < 2]
        with self._changed:
            if self._refusing.locked():
                raise Unsupported("the group is closed")
            for name in call.missing:
                self._pipe(name)
            self._awaited = call
        try:
            for name in first:
                self._dial_agreed(name)
            with self._changed:
                self._changed.wait_for(
                    lambda: not call.missing or call.problem, max(0.0, deadline - time.monotonic())
                )
                if objection:
                    raise Unsupported(objection)
                if call.problem is not None:
                    raise call.problem
                if call.missing:
                    name = min(call.missing)
                    why = f"{_named(name)} was not opened in time"
                    raise PeerUnreachable(why, peer=name.peer)
        except BaseException as error:
            stopped = PeerUnreachable(f"rank {self.rank} was stopped")
            self._give_up(error if isinstance(error, SealringError) else stopped)
            for link in call.links:
                link.discard()
            raise
        finally:
            with self._changed:
                self._awaited = None
        return sorted(call.links, key=lambda link: link.lane)

    def _give_up(self, why: SealringError) -> None:
        """Whatever this end waits for does not come."""
        with self._changed:
            if self._awaited is None:
                return
            self._awaited.problem = self._awaited.problem or why
            for name in self._awaited.missing:
                self.pipes[name].given_up = str(why)
            self._changed.notify_all()

    def _by_agreement(self, name: PipeName) -> bool:
        return name.lane > 0 or (name.purpose == "messages" and not self._sparse)

    def _require_no_objection(self) -> None:
        with self._changed:
            if self._awaited is not None and self._awaited.objection:
                raise Unsupported(self._awaited.objection)

    def _objection_told(self, name: PipeName) -> bool:
        """Notes that the peer has been told this end's objection; False if there is none."""
        with self._changed:
            if self._awaited is None or not self._awaited.objection:
                return False
            self._awaited.missing.discard(name)
            self._changed.notify_all()
            return True

    def _pipe(self, name: PipeName) -> _Pipe:
        """Called for pipes that are opened on demand, or were agreed on: so there are few."""
        return self.pipes.setdefault(name, _Pipe(name))

    def _is_settled(self, name: PipeName) -> bool:
        """Whether the dialer may forget the pipe."""
        with self._changed:
            pipe = self.pipes[name]
            # Its place may be taken by a connection that fails yet: then `settled` dials it again.
            pipe.postponed = pipe.postponed or pipe.open
            return pipe.open or bool(pipe.given_up)

    # ---- the end that was dialed -----------------------------------------------------------------

    def admit(self, hello: Hello) -> PipeName:
        """Final admission check of a verified member that asks for a pipe."""
        name = PipeName(hello.sender, hello.purpose, hello.lane)
        if hello.instance != self.agreed.members[name.peer].instance:
            raise DuplicateRank(
                f"a second worker holds rank {name.peer}, on {hello.host}: the group was formed "
                "with another one"
            )
        with self._changed:
            known = self.pipes.get(name) if self._by_agreement(name) else self._pipe(name)
            pipe = self._require_wanted(name, known)
            if self._by_agreement(name) and self._objection_told(name):
                self._require_no_objection()
            if pipe.connected and name.peer < self.rank:
                raise PeerUnreachable(f"rank {name.peer} is being dialed from here")
            pipe.accepting += 1
        return name

    def _require_wanted(self, name: PipeName, pipe: _Pipe | None) -> _Pipe:
        if self._failure is not None:
            raise GroupEnded(f"the group of rank {self.rank} has failed", failure=self._failure)
        if pipe is None:
            raise PeerUnreachable(f"rank {self.rank} has not agreed to {_named(name)} yet")
        if pipe.given_up:
            raise Unsupported(pipe.given_up)
        if pipe.open:
            raise PeerUnreachable(f"rank {name.peer} is linked already")
        return pipe

    def settled(self, name: PipeName, error: BaseException | None) -> None:
        """A connection that was admitted is the pipe by now, or has failed with this error."""
        with self._changed:
            awaited = self._awaited is not None and name in self._awaited.missing
            if awaited and isinstance(error, Unsupported):
                self._give_up(error)
            pipe = self.pipes[name]
            pipe.accepting -= 1
            dial_now = pipe.postponed and not pipe.accepting and not pipe.open
            pipe.postponed = pipe.postponed and not dial_now and not pipe.open
        if dial_now:
            self._dialers[name.purpose].dial(name)

    def take(self, name: PipeName, channel: SecureChannel) -> Generator[None, None, HandOver]:
        """Settle the pipe. Its place is taken before the dialer is told that the pipe is open.

        After that nothing may fail: the dialer would wait for records of a pipe that is not there.
        """
        reserved: list[_Pipe] = []

        def reserve() -> None:
            with self._changed:
                pipe = self._require_wanted(name, self.pipes[name])
                pipe.open = True
            reserved.append(pipe)

        try:
            self._check_process(channel.peer, channel.peer_hello)
            self._prepare(channel.socket)
            settled = yield from settle_as_acceptor(channel, self._transport, reserve)
        except BaseException:
            with self._changed:
                for pipe in reserved:
                    pipe.open = False
            raise
        return functools.partial(self.add, channel, settled.memory, dialer=False)

    # ---- the end that dials ----------------------------------------------------------------------

    def _on_connected(self, sock: socket.socket, name: PipeName) -> HandOver:
        with self._changed:
            pipe = self.pipes[name]
            if self._is_settled(name):
                sock.close()
                return lambda: None
            if pipe.accepting and name.peer < self.rank:
                raise PeerUnreachable(f"rank {name.peer} has connected itself", peer=name.peer)
            pipe.connected = True
        try:
            return functools.partial(self.add, *self.set_up(sock, name), dialer=True)
        except BaseException:
            with self._changed:
                pipe.connected = False
            raise

    def set_up(
        self, sock: socket.socket, name: PipeName
    ) -> tuple[SecureChannel, SharedMemory | None]:
        send_without_delay(sock)
        deadline = time.monotonic() + _DIAL_SECONDS

        def offer(peer: VerifiedPeer, hello: Hello) -> Message | None:
            """After its accept a dialer does nothing that may fail."""
            self._check_process(peer, hello)
            self._require_no_objection()
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
        with self._changed:
            pipe = self.pipes[name]
            if pipe.open or pipe.given_up:
                return
            if pipe.optional and isinstance(error, PeerUnreachable):
                pipe.optional = pipe.wanted = False
                return
            owner = self._owners.get(name.purpose)
        _LOG.warning("sealring: a link cannot be made: %s", str(error))
        if self._by_agreement(name):
            if not self._objection_told(name):
                self._give_up(error)
        elif owner is not None:
            owner.fail(self.rank if rank is None else rank, error)

    # ---- both ------------------------------------------------------------------------------------

    def add(self, channel: SecureChannel, memory: SharedMemory | None, *, dialer: bool) -> None:
        link = link_of(channel, memory, None, dialer=dialer)
        name = PipeName(link.peer, link.purpose, link.lane)
        with self._changed:
            pipe = self.pipes[name]
            # An acceptor has reserved the place. A dialer's peer that keeps to the rules above has
            # not opened another one.
            second = dialer and pipe.open
            pipe.open = True
            if dialer:
                pipe.connected = False
            awaited = self._by_agreement(name)
            if not second and not awaited and name.purpose not in self._owners:
                self._undelivered.append(link)
                return
        if second:
            link.discard()
        elif awaited:
            self._hand_over_awaited(name, link)
        else:
            self._hand_over(link)

    def _hand_over_awaited(self, name: PipeName, link: Link) -> None:
        with self._changed:
            call = self._awaited
            awaited = call is not None and not call.problem and name in call.missing
            if awaited and call is not None:
                call.missing.remove(name)
                call.links.append(link)
                self._changed.notify_all()
            following = name._replace(lane=name.lane + 1)
            more = awaited and call is not None and following in call.missing
        if not awaited:
            link.discard()
        elif more:
            self._dial_agreed(following)

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
        job = borrow("sealring-dismiss", rest)
        with self._changed:
            self._dismissing.append(job)


def _named(name: PipeName) -> str:
    return f"lane {name.lane} of {name.purpose} to rank {name.peer}"


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
