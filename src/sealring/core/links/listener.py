"""Takes connections from anybody and finds the workers among them.

The process's listening thread continues a connection when bytes have come. A few other threads
compute what TLS needs. None of them waits for a single peer. A peer that is silent, slow or never
stops sending costs a descriptor and some memory for seconds, and is closed when there are too many.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from sealring.core.handshake.connection import is_ready
from sealring.core.handshake.incoming import Incoming
from sealring.core.links import arrivals, setting_up
from sealring.core.links.arrivals import (
    ALWAYS_FREE,
    LEAST_SECONDS,
    MAX_CONNECTIONS_PER_WORKER,
    MOST_GREETING,
    MOST_SILENT,
    SILENT_SECONDS,
    Arrival,
    HandOver,
    Serving,
    UnprovenConnections,
    silent_for,
    source_of,
)
from sealring.core.links.link import send_without_delay
from sealring.core.links.rendezvous import Address
from sealring.core.links.threads import (
    AtWork,
    ListeningThread,
    TlsThreads,
    advanced,
    listening_thread,
)
from sealring.errors import ConfigurationError, PeerUnreachable, SealringError

_LOG = logging.getLogger("sealring")

_BACKLOG: Final = 4096
_ACCEPTS_AT_ONCE: Final = 64
_LOOK_SECONDS: Final = 0.25
_PAUSE_SECONDS: Final = 0.1
_FEW: Final = 64
"""Silent connections that are kept however few descriptors are left. With fewer, strangers who
connect again and again would displace workers before these are served."""


class Listener:
    """Listens from the moment it is made; serves connections after `start`.

    `begin` starts on a connection whose first bytes have come. `handle` serves it once the peer is
    admitted. `refuse` gets every error.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        begin: Callable[[socket.socket], Incoming],
        handle: Callable[[Incoming], Serving],
        refuse: Callable[[SealringError], None],
        ports: Sequence[int] = (),
    ) -> None:
        """With `ports`, on the first of them that is free at all addresses; else on any port."""
        self.begin = begin
        self._handle = handle
        self._refuse = refuse
        self._most_silent = MOST_SILENT
        """Lower once this process had no descriptor left."""
        self.silent = UnprovenConnections(MOST_SILENT)
        self.greeting = UnprovenConnections(MOST_GREETING)
        self.connections: dict[int, Arrival] = {}
        """By descriptor."""
        self._knocking: collections.deque[Arrival] = collections.deque()
        self._stopping = threading.Event()
        self._resume = 0.0
        self._not_taken = 0
        self._next_look = 0.0
        self._accepting = False
        self._thread: ListeningThread | None = None
        self._tls_threads = TlsThreads(self._wake_up)
        self._look_at_all = False
        self._events_lost = False
        """A turn failed. An event that epoll reports only once may have been lost with it."""
        self._sockets: list[socket.socket] = []
        self.epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self.epoll.register(self._wake, select.EPOLLIN)
            self._sockets += listen_at(addresses, ports)
        except BaseException:
            self.stop()
            raise
        if self._sockets:
            arrivals.join(self)

    def close_descriptors(self) -> None:
        """Closes what listens, in a forked child, where none of the threads exists."""
        self._stopping.set()
        for sock in self._sockets:
            sock.close()

    @property
    def addresses(self) -> list[Address]:
        return [sock.getsockname()[:2] for sock in self._sockets]

    def fileno(self) -> int:
        """A descriptor that is readable when there is something to do."""
        return self.epoll.fileno()

    def start(self) -> None:
        if not self._sockets:
            return
        self._accept_or_pause()
        self._thread = listening_thread()
        self._thread.add(self)

    def stop(self, until: float = 0.0) -> None:
        """Closes every connection that `handle` has not handed on. No thread serves them any more.

        A refused member has time until `until` (time.monotonic()) to read why it was refused. It
        may still be sending, and would otherwise find only that the connection was reset.
        """
        if self._stopping.is_set():
            return
        self._stopping.set()
        with AtWork():  # conversations are closed, which a forked child must leave alone
            self._close_all(until)

    def _close_all(self, until: float) -> None:
        arrivals.leave(self)
        if self._thread is not None:
            self._thread.remove(self)
        self._tls_threads.stop()
        for one in self.connections.values():
            if one.refused is not None and one.rank is not None:
                while not one.discard() and is_ready(one.sock, select.POLLIN, until):
                    pass
            one.close()
        for sock in self._sockets:
            sock.close()
        self.epoll.close()
        os.close(self._wake)

    def look_again(self) -> None:
        """Continues all admitted connections: what they wait for may be known now."""
        self._look_at_all = True
        if not self._stopping.is_set():
            self._wake_up()

    def _wake_up(self) -> None:
        os.eventfd_write(self._wake, 1)

    # ---- on the process's listening thread -------------------------------------------------------

    def take_turn(self) -> float | None:
        """Continues every connection with new bytes. Returns the latest time of the next turn."""
        if self._stopping.is_set():
            return None
        try:
            self._go_on()
            return self._accept_or_pause()
        except BaseException:
            self._events_lost = True
            raise

    def _go_on(self) -> None:
        listening = {sock.fileno(): sock for sock in self._sockets}
        for fd, _ in self.epoll.poll(0):
            if fd in listening:
                self._accept(listening[fd])
            elif fd == self._wake:
                os.eventfd_read(self._wake)
            elif (one := self.connections.get(fd)) is not None:
                self.heard(one)
        for one, outcome in self._tls_threads.done():
            self._take(one, outcome)
        if self._events_lost:
            for one in list(self.connections.values()):
                self.heard(one)
            self._look_at_all, self._events_lost = True, False
        self._let_in()
        if self._look_at_all:
            self._look_at_all = False
            for one in self._admitted():
                self._serve(one)
        if self.connections and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_SECONDS
            self._take_share()
            self._drop_overdue()

    def _accept_or_pause(self) -> float | None:
        """A listener without connections sleeps until one comes: it is there as long as a group."""
        now = time.monotonic()
        accepting = now >= self._resume
        if accepting is not self._accepting:
            for sock in self._sockets:
                # One that was reached before another failed, in an earlier turn.
                with contextlib.suppress(FileExistsError, FileNotFoundError):
                    if accepting:
                        self.epoll.register(sock, select.EPOLLIN)
                    else:
                        self.epoll.unregister(sock)
            self._accepting = accepting
        if not self._accepting:
            return self._resume
        return now + _LOOK_SECONDS if self.connections else None

    def _take_share(self) -> None:
        """Limits this listener to its share of what all listeners of the process may hold."""
        if max(len(self.silent), len(self.greeting)) < ALWAYS_FREE:
            return
        silent, greeting = arrivals.share_of(self)
        self.silent.limit_to(min(silent, self._most_silent))
        self.greeting.limit_to(greeting)
        for one in (*self.silent.too_many(), *self.greeting.too_many()):
            self._drop(one, "gave way to connections of other groups")

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock, name = setting_up.accept(listening)
            except OSError as problem:
                if problem.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._out_of_descriptors(problem)
                return
            sock.setblocking(False)
            send_without_delay(sock)
            try:
                # Edge-triggered: bytes stay in the socket until TLS reads them.
                self.epoll.register(sock, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
            except BaseException:
                sock.close()
                raise
            one = Arrival(sock, name[0], name[1], source_of(name[0]), time.monotonic())
            full = not self._make_room(self.silent, one.source)
            self.connections[sock.fileno()] = one
            self.silent.add(one, one.accepted - silent_for(sock))
            if full:
                # Newcomers wait in the kernel's queue, and a flood costs us no more than this.
                self._resume = time.monotonic() + LEAST_SECONDS
                return

    def _make_room(self, stage: UnprovenConnections, source: str) -> bool:
        self._take_share()
        if stage.has_room(source):
            return True
        oldest = stage.to_give_way(source, time.monotonic())
        if oldest is None:
            return False
        self._drop(oldest, "gave way to a newer connection")
        return True

    def _out_of_descriptors(self, problem: OSError) -> None:
        """Closes half of the connections that are waited for, and keeps no more from then on.

        The set-up itself needs descriptors too: to dial, and for shared memory.
        """
        self._not_taken += 1
        if self._not_taken.bit_count() == 1:  # ever fewer: strangers must not fill the disk
            _LOG.warning("sealring: a connection cannot be taken: %s", problem)
        self._resume = time.monotonic() + _PAUSE_SECONDS
        self._most_silent = max(_FEW, len(self.silent) // 2)
        self.silent.limit_to(self._most_silent)
        waiting = [one for one in self.connections.values() if one.waiting_since is not None]
        waiting.sort(key=lambda one: one.waiting_since or 0.0)
        for one in waiting[: -(-len(waiting) // 2)]:
            self._drop(one, "gave way, because this process has no descriptor left")
        if not waiting:
            # It may be a member's: if that one is missing in the end, this is why.
            self._refuse(
                PeerUnreachable(
                    f"a connection could not be taken here ({problem.strerror}): raise this "
                    "process's limit of open files (ulimit -n)"
                )
            )

    def heard(self, one: Arrival) -> None:
        if one.serving is not None:
            self._serve(one)
        elif one.refused is not None:
            self._discard(one)
        elif one in self.greeting:
            if one.waiting_since is None:
                one.more = True
            else:
                self.advance_soon(one)
        elif not one.knocking and one.has_bytes():
            one.knocking = True
            self._knocking.append(one)

    def _let_in(self) -> None:
        """Begins TLS on connections that have sent their first bytes, while there is room."""
        for _ in range(len(self._knocking)):
            one = self._knocking.popleft()
            if one not in self.silent:
                continue  # closed meanwhile
            if not self._make_room(self.greeting, one.source):
                self._knocking.append(one)
                continue
            self.silent.remove(one)
            self.greeting.add(one, time.monotonic())
            self.advance_soon(one)

    def advance_soon(self, one: Arrival) -> None:
        """Continues a connection: at once under a session, which is quick, else on a TLS thread."""
        self.greeting.serve(one)
        one.more = False
        try:
            one.incoming = one.incoming or self.begin(one.sock)
            outcome = advanced(one) if one.incoming.is_session is not False else None
        except BaseException:
            self._wait_again(one)
            raise
        if outcome is not None:
            self._take(one, outcome)
            return
        if (problem := self._tls_threads.serve(one)) is not None:
            _LOG.warning("sealring: a connection cannot be served: %s", problem)
            self._drop(one, f"could not be served: {problem}")

    def _wait_again(self, one: Arrival) -> None:
        """Waits for a connection again whose turn failed. It is closed when its time is up."""
        if one in self.greeting and one.waiting_since is None:
            self.greeting.wait_for(one, time.monotonic())

    def _take(self, one: Arrival, outcome: bool | SealringError) -> None:
        try:
            self._go_on_with(one, outcome)
        except BaseException:
            self._wait_again(one)
            raise

    def _go_on_with(self, one: Arrival, outcome: bool | SealringError) -> None:
        """Continues with the outcome of a turn: an error, True (admitted), or False (not yet)."""
        if isinstance(outcome, SealringError):
            self._end(one, outcome)
        elif outcome:
            assert one.incoming is not None
            one.serving = self._handle(one.incoming)
            self.greeting.remove(one)
            # Behind those that were admitted before: see `_limit`.
            self.connections[one.sock.fileno()] = self.connections.pop(one.sock.fileno())
            self._limit(one.rank)
            self._serve(one)
        else:
            self.greeting.wait_for(one, time.monotonic())
            if one.more:
                self.advance_soon(one)

    def _admitted(self) -> list[Arrival]:
        return [one for one in self.connections.values() if one.serving is not None]

    def _limit(self, rank: int | None) -> None:
        """Closes the oldest connection of a worker that has too many: it displaces no other's."""
        its = [one for one in self._admitted() if one.rank == rank]
        if len(its) > MAX_CONNECTIONS_PER_WORKER:
            self._done_with(its[0], its[0].give_up("gave way to newer connections of its own"))

    def _serve(self, one: Arrival) -> None:
        if (outcome := one.go_on()) is not None:
            self._done_with(one, outcome)

    def _done_with(self, one: Arrival, outcome: HandOver | SealringError) -> None:
        one.serving = None
        if isinstance(outcome, SealringError):
            self.greeting.add(one, time.monotonic())
            self._end(one, outcome)
        else:
            del self.connections[one.sock.fileno()]
            self.epoll.unregister(one.sock)
            one.hand_over(outcome)

    def _end(self, one: Arrival, error: SealringError) -> None:
        """Refuses a peer, which has been told why if that was possible."""
        self._refuse(error)
        one.refused = time.monotonic()
        one.forget()
        with contextlib.suppress(OSError):
            one.sock.shutdown(socket.SHUT_WR)
        self.greeting.wait_for(one, one.refused)
        self._discard(one)

    def _discard(self, one: Arrival) -> None:
        """Reads until a refused peer closes. Closing first could destroy the refusal."""
        if one.discard():
            self._close(one)

    def _drop_overdue(self) -> None:
        now = time.monotonic()
        for one in (*self.silent, *self.greeting):
            if one.overdue(now):
                said = "sent nothing" if one.incoming is None else "did not finish the set-up"
                self._drop(one, f"{said} in time")
        for one in self._admitted():
            if one.incoming is not None and now >= one.incoming.deadline:
                self._serve(one)

    def _drop(self, one: Arrival, why: str) -> None:
        self._close(one)
        if one.refused is None:
            self._refuse(PeerUnreachable(f"the peer at {one.address} port {one.port} {why}"))

    def _close(self, one: Arrival) -> None:
        self._forget(one)
        one.close()

    def _forget(self, one: Arrival) -> None:
        with contextlib.suppress(OSError):
            self.epoll.unregister(one.sock)
        del self.connections[one.sock.fileno()]
        (self.greeting if one in self.greeting else self.silent).remove(one)


def listen_at(addresses: Sequence[str], ports: Sequence[int]) -> list[socket.socket]:
    """A socket for each address, all with one port; with no `ports`, each with any."""
    if not ports or not addresses:
        return [listen(address) for address in addresses]
    problem: OSError | None = None
    for port in ports:
        found: list[socket.socket] = []
        try:
            for address in addresses:
                found.append(_listening(address, port))
        except OSError as why:
            for sock in found:
                sock.close()
            if why.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise _cannot_listen(address, why) from why
            problem = why
        else:
            return found
    assert problem is not None
    raise ConfigurationError(
        f"none of the {len(ports)} ports of SEALRING_PORTS is available on {', '.join(addresses)} "
        f"(port {port}: {problem.strerror}). Each group of each worker on this machine takes one: "
        "give more ports, or end what listens there (`ss -ltnp`); ports below 1024 need privileges "
        "(docs/reach.md)"
    ) from problem


def listen(address: str) -> socket.socket:
    """A socket that listens on one address, on any port."""
    try:
        return _listening(address, 0)
    except OSError as problem:
        raise _cannot_listen(address, problem) from problem


def _cannot_listen(address: str, problem: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"this worker cannot listen on {address} ({problem.strerror}): set SEALRING_ADDRESS "
        "to an address or an interface of this machine"
    )


def _listening(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = setting_up.create(family)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if port:
            # An earlier job's closed connections hold its port for a minute. Two sockets still
            # never listen on one port of one address: listen() refuses the second.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        # The kernel keeps a connection until its first bytes come, so a silent one takes no
        # descriptor, no memory of ours and no place in the queue of those to be accepted. It comes
        # to us without bytes when this time is up, or when the kernel's table of them is full.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, math.ceil(SILENT_SECONDS))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock
