"""A link on its way from the set-up to the native core."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple, Protocol

from sealring import _native
from sealring.core.engine.failures import ERROR_BY_CODE
from sealring.core.handshake.terms import Purpose
from sealring.core.links.diagnosis import NOT_ADMITTED
from sealring.core.links.exchange import OTHER_END_SECONDS, Exchange, Rest
from sealring.core.links.link import Link
from sealring.core.links.memory import SharedMemory
from sealring.core.no_fork import NoFork
from sealring.errors import (
    GroupEnded,
    GroupError,
    NoLongerAdmitted,
    SealringError,
    named,
)

_OUT: Final = {"broker.worker_revoked", *NOT_ADMITTED}
"""Codes of errors that say that a worker is not, or no longer, one of the job."""


class LinkEnds(Protocol):
    """What the engine takes from a link once the handshake is done (links.Link has it)."""

    @property
    def host(self) -> str: ...
    @property
    def memory(self) -> SharedMemory | None: ...
    @property
    def send_key(self) -> _native.Secret: ...
    @property
    def receive_key(self) -> _native.Secret: ...
    @property
    def peer_group_key(self) -> _native.Secret | None: ...
    @property
    def socket(self) -> socket.socket: ...


class LinkSocket(NamedTuple):
    """The socket of a link, as those see it who look at this process from outside."""

    peer: int
    """Its rank in the job."""
    host: str
    transport: Literal["tcp", "shm"]
    inode: int
    """Linux gives the number to no other socket while this one is open."""


def socket_of(peer: int, link: LinkEnds) -> LinkSocket:
    """Called before the link is handed over."""
    transport: Literal["tcp", "shm"] = "tcp" if link.memory is None else "shm"
    return LinkSocket(peer, link.host, transport, os.fstat(link.socket.fileno()).st_ino)


def hand_over(native: _native.Endpoint, peer: int, link: LinkEnds, *, publishes: bool) -> None:
    """Gives the socket, the memory and the keys to the native core, which copies the keys."""
    keys = (link.send_key, link.receive_key)
    group_key = link.peer_group_key if publishes else None
    with NoFork():  # a child finds the socket at one end of this or at the other, and closes it
        if link.memory is None:
            native.add_tcp_link(peer, link.socket.detach(), *keys, group_key)
        else:
            native.add_shm_link(peer, link.socket.detach(), *link.memory, *keys, group_key)
    for key in (*keys, link.peer_group_key):
        if key is not None:
            key.wipe()


class Owner(Protocol):
    """An engine or a mailbox, as far as pipes that are opened late matter to it."""

    def add_late_link(self, peer: int, link: Link) -> Rest | None: ...
    def fail(self, failure: _native.Failure) -> None: ...


class LateEnds:
    """Asks for the pipes that an engine or a mailbox needs, and gives them to it when they come.

    Threads that make links refer to the owner weakly: a group that the script has dropped ends.
    """

    def __init__(
        self, owner: Owner, exchange: Exchange, purpose: Purpose, members: Sequence[int]
    ) -> None:
        self._exchange = exchange
        self._purpose = purpose
        self._members = tuple(members)
        own = weakref.ref(owner)

        def deliver(link: Link) -> Rest | None:
            if (alive := own()) is not None:
                return alive.add_late_link(self._members.index(link.peer), link)
            link.discard()
            return None

        def fail(rank: int, error: SealringError) -> None:
            if (alive := own()) is not None:
                alive.fail(_failure_of(error, rank, self._members, exchange.rank))

        exchange.attach(purpose, deliver, fail)

    def want(self, peers: Iterable[int], *, both: bool = False) -> None:
        """Have links made with these ranks of the group; returns at once.

        `both` says that they want them too: the higher of two ranks dials. The lower one does only
        if it is not dialed soon. The higher one may have failed, and says so when it is asked.
        """
        own = self._exchange.rank
        # A number that is no rank of the group is refused where the call is submitted.
        ranks = {self._members[peer] for peer in peers if 0 <= peer < len(self._members)} - {own}
        later = {rank for rank in ranks if both and rank > own}
        self._exchange.want(self._purpose, ranks - later)
        self._exchange.want(self._purpose, later, after=OTHER_END_SECONDS)

    def ask_all(self) -> None:
        """Have links made with all that can be reached; returns at once."""
        self._exchange.ask(self._purpose, set(self._members) - {self._exchange.rank})

    def refuse_from_now(self, failure: GroupError) -> None:
        """The group has failed; a member that wants a link is told how."""
        self._exchange.refuse_from_now(failure)


def _failure_of(
    error: SealringError, rank: int, members: Sequence[int], own: int
) -> _native.Failure:
    """What a group ends with where a link with `rank` cannot be made."""

    def place(number: int | None) -> int:
        return members.index(number) if number in members else -1

    codes = _native.FailureCode
    if isinstance(error, GroupEnded) and error.failure is not None:
        ended = error.failure
        code = next(code for code, kind in ERROR_BY_CODE.items() if type(ended) is kind)
        # As in an alert: this worker has seen nothing of it, whatever it is told.
        possible = ended.reported_by in members and ended.reported_by != own
        witness = ended.reported_by if possible else error.peer
        told = (place(ended.peer), ended.collective or 0, place(witness), place(error.peer))
        return _native.Failure(code, str(ended), *told)
    out = isinstance(error, NoLongerAdmitted) or error.code in _OUT
    code = codes.NO_LONGER_ADMITTED if out else codes.PEER_LOST
    why = f"no link could be made: {named(error)}: {error}"
    return _native.Failure(code, why[:500], place(rank))


def hand_over_late(native: _native.Endpoint, peer: int, link: Link) -> Rest | None:
    own, theirs = (None, None) if link.memory is None else link.memory
    keys = (link.send_key, link.receive_key)
    with NoFork():  # as above
        dismissal = native.add_late_link(peer, link.socket.detach(), own, theirs, *keys)
    link.send_key.wipe()
    link.receive_key.wipe()
    return None if dismissal is None else dismissal.say
