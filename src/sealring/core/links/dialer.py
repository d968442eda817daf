"""Opens the pipes that this worker dials, some at a time, and tries again until told to stop.

The store may be late, stale or hostile, so each attempt reads it again. A refusal by an admitted
peer is final. Any other failure (a closed port, malformed bytes, a certificate that is not valid
here, a worker of another rank or group) may come from a server that the store named falsely, so
another attempt follows. A rank is given up only when the store has named the same address for some
seconds and the server there shows a certificate that is not valid, or is another worker. Then a
secret, a clock or the store is most likely wrong, and the operator need not wait for the group's
timeout.

A rank that does not answer does not delay the others: after a failed attempt its next one is put
into a queue, and the thread dials another rank. A firewall may drop packets without an answer.
Therefore the first attempt at an address waits one second for an answer, and each further attempt
twice as long, up to ten seconds. Hosts at which this process has opened a pipe are tried first.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import heapq
import itertools
import logging
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from sealring.core.handshake.terms import PipeName
from sealring.core.links import setting_up
from sealring.core.links.diagnosis import is_telling
from sealring.core.links.rendezvous import Address, AddressBook
from sealring.core.links.threads import Job, borrow
from sealring.core.no_fork import OwnLock
from sealring.errors import DuplicateRank, HandshakeError, PeerUnreachable, SealringError

_LOG = logging.getLogger("sealring")

_THREADS: Final = 16
_FIRST_CONNECT_SECONDS: Final = 1.0
_LONGEST_CONNECT_SECONDS: Final = 10.0
_MOST_REACHED: Final = 4096
_FIRST_PAUSE_SECONDS: Final = 0.002
_LONGEST_PAUSE_SECONDS: Final = 1.0
_LAST_SECONDS: Final = 2.0
"""How long `stop` waits for attempts that have called `let_finish`."""
_INVALID_SECONDS: Final = 5.0
"""How long a rank's address must lead to an invalid certificate or to another worker before the
rank is given up. A worker corrects its own address in the store every second."""


_reached_lock = OwnLock()
_reached: collections.OrderedDict[str, None] = collections.OrderedDict()
"""Hosts at which this process has opened a pipe or listens itself, the last one last."""


def note_reached(hosts: Iterable[str]) -> None:
    """From now on these hosts are tried before others: they are known to answer."""
    with _reached_lock:
        for host in hosts:
            _reached[host] = None
            _reached.move_to_end(host)
        while len(_reached) > _MOST_REACHED:
            _reached.popitem(last=False)


def _known_first(addresses: Sequence[Address]) -> tuple[list[Address], list[Address]]:
    """The addresses whose host is known to answer, and the others, each in their order."""
    with _reached_lock:
        known = [each for each in addresses if each[0] in _reached]
    return known, [each for each in addresses if each not in known]


def is_definitive(error: SealringError) -> bool:
    """Whether another attempt at the same rank is useless."""
    if not isinstance(error, HandshakeError):
        return True
    return error.of_a_member and not (error.misdirected or isinstance(error, PeerUnreachable))


class Book(Protocol):
    def lookup(self, rank: int, /) -> tuple[Address, ...]:
        """The addresses at which this rank is said to listen; empty if none is known yet."""
        ...


@dataclass(slots=True, eq=False)
class _Target:
    """A pipe that is dialed, and what its attempts have met so far."""

    pipe: PipeName
    pause: float = _FIRST_PAUSE_SECONDS
    addresses: tuple[Address, ...] = ()
    since: float = field(default_factory=time.monotonic)
    """When the store first named these addresses."""
    invalid: SealringError | None = None
    closed_since: float | None = None
    """Since when every attempt was refused because no process listens on the port."""
    patience: dict[Address, float] = field(default_factory=dict)
    """How many seconds the next attempt at an address waits for an answer; without an entry, 1."""


class Dialer:
    """Dials pipes on threads of its own until `stop`.

    `attempt` sets up one pipe on a connected socket, and raises if it cannot. The function that it
    returns is called when `stop` can no longer cut the socket.
    """

    def __init__(
        self,
        book: Book,
        attempt: Callable[[socket.socket, PipeName], Callable[[], None]],
        fail: Callable[[PipeName, SealringError], None],
        closed_patience: float = math.inf,
        settled: Callable[[PipeName], bool] = lambda pipe: False,
    ) -> None:
        """A rank is given up after `closed_patience` seconds in which its port refused connections.

        A pipe for which `settled` is true is open already, or not needed: it is not dialed.
        """
        self._closed_patience = closed_patience
        self._settled = settled
        self._book = book
        self._attempt = attempt
        self._fail = fail
        self._lock = threading.Condition()
        self._live: set[socket.socket] = set()
        self._finishing: set[socket.socket] = set()
        self._stopping = False
        self._jobs: list[tuple[float, int, PipeName, Callable[[], None]]] = []
        """A heap of (time at which it is due, number that keeps the order, pipe, function)."""
        self._numbers = itertools.count()
        self._threads: list[Job] = []
        self._idle = 0
        self.problems: dict[int, SealringError] = {}
        """The last problem with each rank, for the error if time runs out."""

    def dial(self, pipe: PipeName, after: float = 0.0) -> None:
        """Starts to dial a pipe `after` seconds from now, and repeats it until the pipe is open."""
        self._put(pipe, functools.partial(self._reach, _Target(pipe)), after)

    def probe(self, rank: int, addresses: Sequence[Address], then: Callable[[], None]) -> None:
        """Dials these addresses once. If a worker with our own rank answers, the group fails.

        `then` is called afterwards.
        """
        pipe = PipeName(rank)
        self._put(pipe, functools.partial(self._probe, pipe, addresses, then))

    def _put(self, pipe: PipeName, job: Callable[[], None], pause: float = 0.0) -> None:
        with self._lock:
            if self._stopping:
                return  # stop() would not end a thread that is started now
            now = time.monotonic()
            heapq.heappush(self._jobs, (now + pause, next(self._numbers), pipe, job))
            due = sum(when <= now for when, *_ in self._jobs)
            problem = None
            lacking = due > self._idle or not self._threads
            if lacking and len(self._threads) < _THREADS:
                problem = self._start_thread()
            self._lock.notify()
        if problem is not None:
            self._fail(pipe, PeerUnreachable(f"no thread can be started to dial: {problem}"))

    def _start_thread(self) -> RuntimeError | None:
        """Returns the problem only if there is no thread at all: fewer threads still dial all."""
        try:
            self._threads.append(borrow("sealring-dial", self._run))
        except RuntimeError as problem:
            return None if self._threads else problem
        return None

    def let_finish(self, sock: socket.socket) -> None:
        """Called by an attempt whose peer may take this connection for a link from now on.

        `stop` waits for such an attempt: if it were cut, the peer would take this worker for lost.
        """
        with self._lock:
            if self._stopping:
                raise PeerUnreachable("the group makes no further link")
            self._finishing.add(sock)

    def break_off(self) -> None:
        """Ends all attempts but those that called `let_finish`, and begins none. Does not wait."""
        with self._lock:
            self._stopping = True
            self._jobs.clear()
            self._lock.notify_all()
            self._cut(self._live - self._finishing)

    def stop(self) -> None:
        """Ends the dialing like `break_off`, and waits for the threads."""
        self.break_off()
        with self._lock:
            self._lock.wait_for(lambda: not self._live, _LAST_SECONDS)
            self._cut(self._live)
        for thread in self._threads:
            thread.join()

    def _cut(self, live: set[socket.socket]) -> None:
        for sock in live:
            # Not close(): its thread may be waiting on the descriptor, and this wakes it.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        while (next_job := self._next()) is not None:
            pipe, job = next_job
            try:
                job()
            except SealringError as error:
                self._fail(pipe, error)
            except Exception as problem:  # a thread must not end without a word
                _LOG.exception("sealring: dialing failed")
                self._fail(pipe, PeerUnreachable(f"dialing failed: {problem!r}", peer=pipe.peer))
            del next_job, job

    def _next(self) -> tuple[PipeName, Callable[[], None]] | None:
        with self._lock:
            while not self._stopping:
                left = self._jobs[0][0] - time.monotonic() if self._jobs else None
                if left is not None and left <= 0:
                    _, _, pipe, job = heapq.heappop(self._jobs)
                    return pipe, job
                self._idle += 1
                self._lock.wait(left)
                self._idle -= 1
        return None

    def _reach(self, target: _Target) -> None:
        """Tries each address once. If none leads to the rank, the next attempt follows later."""
        rank = target.pipe.peer
        if self._settled(target.pipe):
            return
        try:
            addresses = self._book.lookup(rank)
        except HandshakeError as error:
            if error.proven:  # its own signed word, which stays as it is
                raise
            self.problems[rank] = error
            # A store that cannot be read says nothing new: the last addresses stay.
            addresses = target.addresses if isinstance(error, PeerUnreachable) else ()
        now = time.monotonic()
        if addresses != target.addresses:
            target.addresses, target.since, target.invalid = addresses, now, None
            target.patience.clear()
        known, others = _known_first(addresses)
        unreachable: dict[Address, int] = {}
        elsewhere = 0
        for address in (*known, *others):
            patience = target.patience.get(address, _FIRST_CONNECT_SECONDS)
            met = self._try(target.pipe, address, patience)
            if met is None:
                return
            if met == errno.ETIMEDOUT:
                target.patience[address] = min(2 * patience, _LONGEST_CONNECT_SECONDS)
            if met > 0:
                unreachable[address] = met
            problem = self.problems[rank]
            if isinstance(problem, HandshakeError) and problem.misdirected:
                # One network's private address is another worker's in another network.
                elsewhere += 1
            elif is_telling(problem):
                target.invalid = problem
        if elsewhere and elsewhere == len(addresses):
            target.invalid = self.problems[rank]
        elif unreachable and len(unreachable) + elsewhere == len(addresses):
            self.problems[rank] = _unreachable(rank, unreachable)
        closed = bool(addresses) and all(
            unreachable.get(each) == errno.ECONNREFUSED for each in known or others
        )
        if target.invalid is not None:
            self.problems[rank] = target.invalid
            if time.monotonic() >= target.since + _INVALID_SECONDS:
                if isinstance(target.invalid, HandshakeError) and target.invalid.misdirected:
                    target.invalid.peer = rank  # the one that is missing, not the one that was met
                raise target.invalid
        self._check_closed(target, closed, now)
        self._put(target.pipe, functools.partial(self._reach, target), target.pause)
        target.pause = min(2 * target.pause, _LONGEST_PAUSE_SECONDS)

    def _check_closed(self, target: _Target, closed: bool, began: float) -> None:
        if not closed:
            target.closed_since = None
            return
        target.closed_since = began if target.closed_since is None else target.closed_since
        if time.monotonic() >= target.closed_since + self._closed_patience:
            rank = target.pipe.peer
            raise PeerUnreachable(
                f"rank {rank} has ended, or has left the group: its machine has refused every "
                f"connection for {self._closed_patience:g} s; the last attempt: "
                f"{self.problems[rank]}",
                peer=rank,
            )

    def _probe(
        self, pipe: PipeName, addresses: Sequence[Address], then: Callable[[], None]
    ) -> None:
        try:
            for address in addresses:
                self._try(pipe, address, _FIRST_CONNECT_SECONDS)
        except DuplicateRank:
            raise
        except SealringError as error:
            _LOG.warning("sealring: not rank %d, whatever the store says: %s", pipe.peer, error)
        then()

    def _try(self, pipe: PipeName, address: Address, patience: float) -> int | None:
        """None if the pipe is open, or the dialer stops; else the errno of connect(), or -1."""
        rank = pipe.peer
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            sock = setting_up.create(family)
        except OSError as problem:
            self._note_lack(rank, address, problem)
            return -1
        with self._lock:
            self._live.add(sock)
        try:
            if self._stopping:
                sock.close()
                return None
            if refused := _connect(sock, address, patience):
                sock.close()
                self.problems[rank] = _unreachable(rank, {address: refused})
                return refused
            hand_over = self._attempt(sock, pipe)
        except SealringError as error:
            sock.close()
            if is_definitive(error):
                raise
            self.problems[rank] = error
            _LOG.debug("sealring: rank %d at %s is tried again: %s", rank, address, error)
            return -1
        except OSError as problem:
            sock.close()
            self._note_lack(rank, address, problem)
            return -1
        except BaseException:
            sock.close()
            raise
        finally:
            with self._lock:
                self._live.discard(sock)
                self._finishing.discard(sock)
                if self._stopping:
                    self._lock.notify_all()
        note_reached([address[0]])
        hand_over()
        return None

    def _note_lack(self, rank: int, address: Address, problem: OSError) -> None:
        """Notes that this process has no descriptor left, or lacks another resource.

        Connections of strangers may hold it. They end within seconds, so the attempt is repeated.
        """
        lack = PeerUnreachable(
            f"rank {rank} cannot be dialed at {address[0]} port {address[1]}: {problem.strerror}",
            peer=rank,
        )
        if str(self.problems.get(rank)) != str(lack):  # one line a cause, and not one a try
            _LOG.warning("sealring: %s; trying again", lack)
        self.problems[rank] = lack


def _unreachable(rank: int, met: Mapping[Address, int]) -> PeerUnreachable:
    tried = ", at ".join(
        f"{host} port {port}: {os.strerror(problem)}" for (host, port), problem in met.items()
    )
    return PeerUnreachable(
        f"rank {rank} cannot be connected to at {tried}; check that it runs, and that no firewall "
        "keeps this machine from there: `sealring doctor --peer HOST:PORT` tells, and "
        "docs/reach.md shows how to open a way",
        peer=rank,
    )


def _connect(sock: socket.socket, address: Address, patience: float) -> int:
    """Connects a socket, and returns 0 or the errno. `stop` interrupts it by cutting the socket."""
    sock.setblocking(False)
    problem = sock.connect_ex(address)
    if problem != errno.EINPROGRESS:
        return problem  # of this call alone: the socket itself has no error then
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    if not poll.poll(patience * 1000):
        return errno.ETIMEDOUT
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


LOOK_SECONDS: Final = 1.0


class OwnAddress:
    """Keeps this worker's address in the store. Used by one thread only."""

    def __init__(
        self, book: AddressBook, rank: int, addresses: Sequence[Address], dialer: Dialer
    ) -> None:
        self._book = book
        self._rank = rank
        self._addresses = tuple(addresses)
        self._dialer = dialer
        self._next_look = time.monotonic() + LOOK_SECONDS
        self._published = False
        self._probing = False

    def publish(self) -> None:
        self._book.publish(self._rank, self._addresses)
        self._published = True

    def check(self) -> None:
        """Put our address back if the store shows another one, and look who answers there.

        An address that was not published yet is published: by now others may have to dial here.

        Either a second worker has our rank, which it can prove, or the store is wrong. The address
        is corrected first, because a false one may lead to a server that answers slowly.
        """
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_SECONDS
        if not self._published:
            with contextlib.suppress(PeerUnreachable):
                self.publish()
            return
        found: tuple[Address, ...] = ()
        shown = "another"
        try:
            found = self._book.lookup(self._rank)
            shown = shown if found else "no"
        except PeerUnreachable:
            shown = "no"  # it does not answer
        except HandshakeError:
            pass
        if found == self._addresses:
            return
        if not self._probing:
            _LOG.warning("sealring: the store shows %s address for rank %d", shown, self._rank)
        with contextlib.suppress(PeerUnreachable):
            self.publish()
        if not self._probing:
            self._probing = True  # one at a time: the store chooses how many addresses there are
            self._dialer.probe(self._rank, found, self._on_probed)

    def _on_probed(self) -> None:
        self._probing = False
