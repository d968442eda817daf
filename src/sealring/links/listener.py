"""Takes connections from anybody and finds the workers among them.

One thread waits for all connections whose peer is not admitted yet; a few others compute what TLS
needs when bytes have come. None of them waits for a single peer, so a peer that is silent, slow or
endless costs a descriptor and some memory for seconds, and gives way when there are too many. An
admitted worker gets a thread of its own for the rest of the set-up.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from sealring.errors import MalformedSetup, PeerUnreachable, SealringError
from sealring.handshake.peers import Incoming
from sealring.links import shares
from sealring.links.admitted import AdmittedWorkers, HandOver
from sealring.links.link import send_without_delay
from sealring.links.listening import listen
from sealring.links.rendezvous import Address
from sealring.links.unproven import (
    ALWAYS_FREE,
    LEAST_SECONDS,
    MOST_GREETING,
    MOST_SILENT,
    Unproven,
    UnprovenConnections,
    silent_for,
    source_of,
)

_LOG = logging.getLogger("sealring")

_TLS_THREADS: Final = 4
_ACCEPTS_AT_ONCE: Final = 64
_LOOK_SECONDS: Final = 0.25
_PAUSE_SECONDS: Final = 0.1
_DISCARDED_BYTES: Final = 64 << 10
_FEW: Final = 64
"""Silent connections for which there is room however few descriptors are left: with fewer,
strangers who come again and again would displace workers before they are served."""


class Listener:
    """Listens from the moment it is made; serves connections after `start`.

    `begin` starts TLS on a connection whose first bytes have come. `handle` gets it once the peer
    is admitted, on a thread of its own. `refuse` gets every error before that.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        begin: Callable[[socket.socket], Incoming],
        handle: Callable[[Incoming], HandOver | None],
        refuse: Callable[[SealringError], None],
    ) -> None:
        self._begin = begin
        self._refuse = refuse
        self._most_silent = MOST_SILENT
        """Lower once this process had no descriptor left."""
        self.silent = UnprovenConnections(MOST_SILENT)
        self.greeting = UnprovenConnections(MOST_GREETING)
        self._by_descriptor: dict[int, Unproven] = {}
        self._knocking: collections.deque[Unproven] = collections.deque()
        self._due: collections.deque[Unproven] = collections.deque()
        """To be advanced: one for each call that the TLS threads have before them."""
        self._served: queue.SimpleQueue[tuple[Unproven, bool | SealringError]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._resume = 0.0
        self._not_taken = 0
        self._thread: threading.Thread | None = None
        self._tls_threads = ThreadPoolExecutor(_TLS_THREADS, "sealring-accept")
        self._admitted = AdmittedWorkers(handle)
        self._sockets: list[socket.socket] = []
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._epoll.register(self._wake, select.EPOLLIN)
            for address in addresses:
                self._sockets.append(listen(address))
        except BaseException:
            self.stop()
            raise
        if self._sockets:
            shares.join(self)

    def close_descriptors(self) -> None:
        """In a forked child, where none of the threads exists."""
        self._stopping.set()
        for sock in self._sockets:
            sock.close()

    @property
    def addresses(self) -> list[Address]:
        return [sock.getsockname()[:2] for sock in self._sockets]

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="sealring-listen", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close everything that `handle` has not yet handed on, and wait for the threads."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        shares.leave(self)
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join()
        self._tls_threads.shutdown()
        for one in self._by_descriptor.values():
            one.sock.close()
        self._admitted.stop()
        for sock in self._sockets:
            sock.close()
        self._epoll.close()
        os.close(self._wake)

    # ---- the thread that waits for all of them ---------------------------------------------------

    def _run(self) -> None:
        listening = {sock.fileno(): sock for sock in self._sockets}
        accepting = False
        next_look = 0.0
        while not self._stopping.is_set():
            now = time.monotonic()
            if accepting is (now < self._resume):
                accepting = not accepting
                for fd in listening:
                    if accepting:
                        self._epoll.register(fd, select.EPOLLIN)
                    else:
                        self._epoll.unregister(fd)
            for fd, _ in self._epoll.poll(self._patience() if accepting else self._resume - now):
                if fd in listening:
                    self._accept(listening[fd])
                elif fd == self._wake:
                    os.eventfd_read(self._wake)
                elif (one := self._by_descriptor.get(fd)) is not None:
                    self._heard(one)
            while not self._served.empty():
                self._take(*self._served.get())
            self._let_in()
            if self._by_descriptor and time.monotonic() >= next_look:
                next_look = time.monotonic() + _LOOK_SECONDS
                self._take_share()
                self._drop_overdue()

    def _patience(self) -> float:
        """A listener without connections sleeps until one comes: it is there as long as a group."""
        return _LOOK_SECONDS if self._by_descriptor else -1.0

    def _take_share(self) -> None:
        """Of what all listeners of this process may hold; it shrinks when others hold more."""
        if max(len(self.silent), len(self.greeting)) < ALWAYS_FREE:
            return
        silent, greeting = shares.share_of(self)
        self.silent.limit_to(min(silent, self._most_silent))
        self.greeting.limit_to(greeting)
        for one in (*self.silent.too_many(), *self.greeting.too_many()):
            self._drop(one, "gave way to connections of other groups")

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock, name = listening.accept()
            except OSError as problem:
                if problem.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._out_of_descriptors(problem)
                return
            sock.setblocking(False)
            send_without_delay(sock)
            one = Unproven(sock, name[0], name[1], source_of(name[0]), time.monotonic())
            full = not self._make_room(self.silent, one.source)
            self._by_descriptor[sock.fileno()] = one
            self.silent.add(one, one.accepted - silent_for(sock))
            # Told of each arrival once: bytes stay in the socket until TLS wants them.
            self._epoll.register(sock, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
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
        """Half of the connections that we wait for give way, and no more than that come back.

        The set-up itself needs descriptors too: to dial, and for shared memory.
        """
        self._not_taken += 1
        if self._not_taken.bit_count() == 1:  # ever fewer: strangers must not fill the disk
            _LOG.warning("sealring: a connection cannot be taken: %s", problem)
        self._resume = time.monotonic() + _PAUSE_SECONDS
        self._most_silent = max(_FEW, len(self.silent) // 2)
        self.silent.limit_to(self._most_silent)
        waiting = [one for one in self._by_descriptor.values() if one.waiting_since is not None]
        waiting.sort(key=lambda one: one.waiting_since or 0.0)
        for one in waiting[: -(-len(waiting) // 2)]:
            self._drop(one, "gave way, because this process has no descriptor left")

    def _heard(self, one: Unproven) -> None:
        if one.refused is not None:
            self._discard(one)
        elif one in self.greeting:
            if one.waiting_since is None:
                one.more = True
            else:
                self._advance_soon(one)
        elif _has_bytes(one.sock):
            self._knocking.append(one)

    def _let_in(self) -> None:
        """Begin TLS with those that have sent their first bytes, as far as there is room."""
        for _ in range(len(self._knocking)):
            one = self._knocking.popleft()
            if one not in self.silent:
                continue  # closed meanwhile
            if not self._make_room(self.greeting, one.source):
                self._knocking.append(one)
                continue
            self.silent.remove(one)
            self.greeting.add(one, time.monotonic())
            self._advance_soon(one)

    def _advance_soon(self, one: Unproven) -> None:
        self.greeting.serve(one)
        one.more = False
        self._due.append(one)
        try:
            self._tls_threads.submit(self._advance_newest)
        except RuntimeError as problem:  # no further thread can be started
            _LOG.warning("sealring: a connection cannot be served: %s", problem)
            self._drop(one, f"could not be served: {problem}")

    def _take(self, one: Unproven, outcome: bool | SealringError) -> None:
        """What a TLS thread has done with a connection."""
        if one not in self.greeting:
            return  # closed meanwhile: no thread could be started for it at first
        if isinstance(outcome, SealringError):
            self._refuse(outcome)
            one.refused = time.monotonic()
            with contextlib.suppress(OSError):
                one.sock.shutdown(socket.SHUT_WR)
            self.greeting.wait_for(one, one.refused)
            self._discard(one)
        elif outcome:
            self._forget(one)
            assert one.incoming is not None
            self._admitted.serve(one.incoming, one.sock)
        else:
            self.greeting.wait_for(one, time.monotonic())
            if one.more:
                self._advance_soon(one)

    def _discard(self, one: Unproven) -> None:
        """Read on until a refused peer closes: closing first could destroy the refusal."""
        try:
            while one.discarded < _DISCARDED_BYTES:
                if not (chunk := one.sock.recv(16 << 10)):
                    break
                one.discarded += len(chunk)
        except BlockingIOError:
            return
        except OSError:
            pass
        self._close(one)

    def _drop_overdue(self) -> None:
        now = time.monotonic()
        for one in (*self.silent, *self.greeting):
            if one.overdue(now):
                said = "sent nothing" if one.incoming is None else "did not finish the set-up"
                self._drop(one, f"{said} in time")

    def _drop(self, one: Unproven, why: str) -> None:
        self._close(one)
        if one.refused is None:
            self._refuse(PeerUnreachable(f"the peer at {one.address} port {one.port} {why}"))

    def _close(self, one: Unproven) -> None:
        self._forget(one)
        one.sock.close()

    def _forget(self, one: Unproven) -> None:
        self._epoll.unregister(one.sock)
        del self._by_descriptor[one.sock.fileno()]
        (self.greeting if one in self.greeting else self.silent).remove(one)

    # ---- other threads ---------------------------------------------------------------------------

    def _advance_newest(self) -> None:
        """The newest first: in a flood a worker is served at once, and not after the flood."""
        one = self._due.pop()
        outcome: bool | SealringError
        try:
            one.incoming = one.incoming or self._begin(one.sock)
            outcome = one.incoming.advance()
        except SealringError as error:
            outcome = error
        except Exception as problem:
            # Whatever this is, a stranger may have caused it, so it must not end the job.
            _LOG.exception("sealring: a connection was dropped")
            outcome = MalformedSetup(f"the peer at {one.address} was dropped: {problem!r}")
        self._served.put((one, outcome))
        os.eventfd_write(self._wake, 1)


def _has_bytes(sock: socket.socket) -> bool:
    """Whether the peer has sent something, closed the connection, or reset it."""
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
