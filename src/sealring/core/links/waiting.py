"""Links that have their keys and wait for the others: the state that the mesh's threads share."""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from sealring import _native
from sealring.core.handshake.channel import SecureChannel
from sealring.core.handshake.messages import Hello
from sealring.core.handshake.terms import Terms
from sealring.core.links.agreement import Settled
from sealring.core.links.diagnosis import is_telling
from sealring.errors import DuplicateRank, HandshakeError, PeerUnreachable, SealringError, WrongRank

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
    """The peer has said that its first links are there: it replaces none any more."""
    linked: dict[int, str] = field(default_factory=dict)
    """The instances that the peer said it is linked with, by rank."""
    ready: str = ""
    """The transcript with which the peer said that the group exists for it. Its next bytes are
    records, so the channel must not be read again."""
    lost: bool = False
    """The group exists here, and the peer does not say so."""

    @property
    def rank(self) -> int:
        return self.channel.peer.rank

    def has_bytes(self) -> bool | None:
        """Whether there is something to read; None if the connection is cut. Nothing is taken."""
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
    """Every method may be called from any thread. Each change wakes those that wait on `wake`."""

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
        self._informed: set[int] = set()
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def admit(self, hello: Hello) -> None:
        """The last word on a verified worker that dialed us."""
        rank = hello.sender
        # PeerUnreachable would have the dialer try again; on a link it ends the peer's attempt too,
        # so such a peer is linked and then told.
        if self._told is not None and not isinstance(self._told, PeerUnreachable):
            self.mark_informed(rank)
            raise copy.copy(self._told)
        if hello.instance == self._terms.instance:
            raise PeerUnreachable(f"rank {rank} reached itself: the rendezvous store is wrong")
        if rank <= self._terms.rank:
            raise WrongRank(
                f"rank {rank} dialed rank {self._terms.rank}: of each pair the higher one dials, "
                "so it runs another version of sealring"
            )
        with self._lock:
            known = self._instances.setdefault(rank, hello.instance)
        if known != hello.instance:
            raise DuplicateRank(
                f"a second worker holds rank {rank}, on {hello.host}: two workers were started "
                "with one RANK, or an earlier run is still alive"
            )

    def forget(self, hello: Hello) -> None:
        """A worker that was admitted did not come through; its place is free again."""
        with self._lock:
            link = self._links.get(hello.sender)
            linked = link is not None and link.channel.peer_hello.instance == hello.instance
            if not linked and self._instances.get(hello.sender) == hello.instance:
                del self._instances[hello.sender]

    def add(self, link: WaitingLink) -> None:
        """Waits for no peer: the thread that serves all listeners of the process may be here."""
        with self._lock:
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
        """Raise why the link of this peer comes too late, if it does."""
        with self._lock:
            if not self._closed:
                return
            told = self._told
        if told is None:
            raise PeerUnreachable(f"the first links of rank {self._terms.rank} are there already")
        self.mark_informed(rank)
        raise copy.copy(told)

    def remove(self, link: WaitingLink) -> bool:
        """Take out a link whose connection is cut; False if it is too late to do without it."""
        with self._lock:
            if self._closed:
                return False
            if self._links.get(link.rank) is link:
                del self._links[link.rank]
                self._instances.pop(link.rank, None)
                self._replaced.append(link)
        return True

    def fail(self, error: SealringError) -> None:
        """What ends the set-up. The first one counts."""
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
        """Nothing waits for a change any more."""
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
        """The links there are, in the order of their ranks; raises what ended the set-up."""
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
        """Take no further link; True for the caller that closed it."""
        with self._lock:
            first, self._closed = not self._closed, True
        return first

    def tell(self, links: Collection[WaitingLink]) -> None:
        """Let their peers know why there will be no group. May wait for each a moment."""
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
        """Close, and leave all links to the caller. Who comes later is to be `told` why."""
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
        """Leave the links that came after `take_all` to the caller."""
        with self._lock:
            links, self._newcomers = self._newcomers, []
        return links
