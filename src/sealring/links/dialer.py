"""Reaches the ranks that this worker dials, some at a time, and tries again until told to stop.

The store may be late, stale or hostile, so each attempt reads it anew. An admitted peer's refusal
is final. Anything else (a closed port, rubbish, a certificate that is not valid here) may come from
a server that the store named falsely, and the next attempt follows. A rank is given up only when
the store has named the same address for some seconds and the server there has shown a certificate
that is not valid: then a secret or a clock is most likely wrong, and the operator should not have
to wait for the group's timeout.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from sealring.errors import DuplicateRank, HandshakeError, PeerUnreachable, SealringError
from sealring.links.diagnosis import NOT_ADMITTED
from sealring.links.rendezvous import Address

_LOG = logging.getLogger("sealring")

_THREADS: Final = 16
_CONNECT_SECONDS: Final = 10.0
_FIRST_PAUSE_SECONDS: Final = 0.002
_LONGEST_PAUSE_SECONDS: Final = 1.0
_INVALID_SECONDS: Final = 5.0
"""How long a rank's address must have led to an invalid certificate before the rank is given up. A
worker corrects its own address in the store every second."""


def is_definitive(error: SealringError) -> bool:
    """Whether trying the same rank again cannot help."""
    if not isinstance(error, HandshakeError):
        return True
    return error.proven and not isinstance(error, PeerUnreachable)


class Book(Protocol):
    def lookup(self, rank: int, /) -> tuple[Address, ...]:
        """Where this rank is said to listen; nothing if that is not known yet."""
        ...


class Dialer:
    """`attempt` sets up one link on a connected socket and raises if it cannot.

    What it gives back is called once stop() will no longer cut the socket.
    """

    def __init__(
        self,
        book: Book,
        attempt: Callable[[socket.socket, int], Callable[[], None]],
        fail: Callable[[SealringError], None],
        patience: float = math.inf,
    ) -> None:
        """A rank that is not reached after `patience` seconds is given up."""
        self._patience = patience
        self._book = book
        self._attempt = attempt
        self._fail = fail
        self._lock = threading.Lock()
        self._live: set[socket.socket] = set()
        self._stopping = threading.Event()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.problems: dict[int, SealringError] = {}
        """The last thing that went wrong with each rank, for the message if time runs out."""

    def dial(self, rank: int) -> None:
        """Reach `rank`, however often that must be tried."""
        self._put(functools.partial(self._reach, rank))

    def probe(self, rank: int, addresses: Sequence[Address], then: Callable[[], None]) -> None:
        """Try once whether our own rank answers there; only that it does is a failure."""
        self._put(functools.partial(self._probe, rank, addresses, then))

    def _put(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._stopping.is_set():
                return  # stop() would not end a thread that is started now
            self._jobs.put(job)
            if len(self._threads) < _THREADS:
                thread = threading.Thread(target=self._run, name="sealring-dial", daemon=True)
                self._threads.append(thread)
                thread.start()

    def stop(self) -> None:
        """Break off what is under way, and wait for the threads."""
        with self._lock:
            if self._stopping.is_set():
                return
            self._stopping.set()
            for _ in self._threads:
                self._jobs.put(None)
            for sock in self._live:
                # Not close(): its thread may be waiting on the descriptor, and this wakes it.
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except SealringError as error:
                self._fail(error)
            except Exception as problem:  # a thread must not end without a word
                _LOG.exception("sealring: dialing failed")
                self._fail(PeerUnreachable(f"dialing failed: {problem!r}"))

    def _reach(self, rank: int) -> None:
        pause = _FIRST_PAUSE_SECONDS
        invalid: SealringError | None = None
        latest: tuple[Address, ...] = ()
        began = since = time.monotonic()
        while not self._stopping.is_set():
            try:
                addresses = self._book.lookup(rank)
            except HandshakeError as error:
                self.problems[rank] = error
                addresses = ()
            if addresses != latest:
                latest, since, invalid = addresses, time.monotonic(), None
            for address in addresses:
                if self._try(rank, address):
                    return
                if isinstance(self.problems[rank], NOT_ADMITTED):
                    invalid = self.problems[rank]
            if invalid is not None:
                self.problems[rank] = invalid
                if time.monotonic() >= since + _INVALID_SECONDS:
                    raise invalid
            if time.monotonic() >= began + self._patience:
                problem = self.problems.get(rank, "it has no address")
                raise PeerUnreachable(
                    f"rank {rank} was not reached within {self._patience:g} s; the last attempt: "
                    f"{problem}",
                    peer=rank,
                )
            self._stopping.wait(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_SECONDS)

    def _probe(self, rank: int, addresses: Sequence[Address], then: Callable[[], None]) -> None:
        try:
            for address in addresses:
                self._try(rank, address)
        except DuplicateRank:
            raise
        except SealringError as error:
            _LOG.warning("sealring: not rank %d, whatever the store says: %s", rank, error)
        then()

    def _try(self, rank: int, address: Address) -> bool:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as problem:
            self._note_lack(rank, address, problem)
            return False
        with self._lock:
            self._live.add(sock)
        try:
            if self._stopping.is_set():
                sock.close()
                return True
            _connect(sock, address, rank)
            hand_over = self._attempt(sock, rank)
        except SealringError as error:
            sock.close()
            if is_definitive(error):
                raise
            self.problems[rank] = error
            _LOG.debug("sealring: rank %d at %s is tried again: %s", rank, address, error)
            return False
        except OSError as problem:
            sock.close()
            self._note_lack(rank, address, problem)
            return False
        except BaseException:
            sock.close()
            raise
        finally:
            with self._lock:
                self._live.discard(sock)
        hand_over()
        return True

    def _note_lack(self, rank: int, address: Address, problem: OSError) -> None:
        """This process lacks something, a descriptor most likely: strangers may have taken them.

        They give them back within seconds, so the attempt is repeated until the time is up.
        """
        self.problems[rank] = PeerUnreachable(
            f"rank {rank} cannot be dialed at {address[0]} port {address[1]}: {problem.strerror}",
            peer=rank,
        )
        _LOG.warning("sealring: %s; trying again", self.problems[rank])


def _connect(sock: socket.socket, address: Address, rank: int) -> None:
    """Connect, without blocking where it could not be interrupted."""
    sock.setblocking(False)
    problem = sock.connect_ex(address)
    if problem:
        poll = select.poll()
        poll.register(sock, select.POLLOUT)
        end = time.monotonic() + _CONNECT_SECONDS
        while not poll.poll(max(0.0, end - time.monotonic()) * 1000):
            if time.monotonic() >= end:
                raise PeerUnreachable(
                    f"nothing answers at {address[0]} port {address[1]}, where rank {rank} is said "
                    "to listen: check the firewall between the machines",
                    peer=rank,
                )
        problem = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if problem:
        raise PeerUnreachable(
            f"rank {rank} cannot be connected to at {address[0]} port {address[1]}: "
            f"{os.strerror(problem)}",
            peer=rank,
        )
