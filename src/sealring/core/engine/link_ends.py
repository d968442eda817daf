"""Gives links to the native core: those that formed with the group, and those made later."""

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
"""Codes of errors that say that a worker is not, or no longer, a member of the job."""


class LinkEnds(Protocol):
    """The parts of a link that the engine uses after the handshake; links.Link has them."""

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
    """The socket of a link, described so that observers outside this process can find it."""

    peer: int
    """The peer's rank in the job."""
    host: str
    transport: Literal["tcp", "shm"]
    inode: int
    """The socket's inode; no other open socket has the same."""


def socket_of(peer: int, link: LinkEnds) -> LinkSocket:
    """Describes a link's socket. Call it before the link is handed over."""
    transport: Literal["tcp", "shm"] = "tcp" if link.memory is None else "shm"
    return LinkSocket(peer, link.host, transport, os.fstat(link.socket.fileno()).st_ino)


def hand_over(native: _native.Endpoint, peer: int, link: LinkEnds, *, publishes: bool) -> None:
    """Gives the socket, the memory and the keys to the native core, which copies the keys.

    The link's own copies of the keys are then wiped. With `publishes` the core also gets the peer's
    group key.
    """
    keys = (link.send_key, link.receive_key)
    group_key = link.peer_group_key if publishes else None
    with NoFork():  # else a forked child might get a socket that it does not know of and close
        if link.memory is None:
            native.add_tcp_link(peer, link.socket.detach(), *keys, group_key)
        else:
            native.add_shm_link(peer, link.socket.detach(), *link.memory, *keys, group_key)
    for key in (*keys, link.peer_group_key):
        if key is not None:
            key.wipe()


class Owner(Protocol):
    """The parts of an engine or a mailbox that `LateEnds` uses."""

    def add_late_link(self, peer: int, link: Link) -> Rest | None: ...
    def fail(self, failure: _native.Failure) -> None: ...


class LateEnds:
    """Asks for the pipes that an engine or a mailbox needs later, and gives them to it.

    Threads that make links refer to the owner weakly, so that a group ends when the script drops
    it.
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
        """Asks for links with these ranks of the group; returns at once.

        `both` says that these ranks ask for the links, too. Then the higher of two ranks dials. The
        lower rank dials only if it is not dialed soon: the higher one may have failed, and tells
        so when it is dialed.
        """
        own = self._exchange.rank
        # The submission of the call refuses numbers that are not ranks of the group.
        ranks = {self._members[peer] for peer in peers if 0 <= peer < len(self._members)} - {own}
        later = {rank for rank in ranks if both and rank > own}
        self._exchange.want(self._purpose, ranks - later)
        self._exchange.want(self._purpose, later, after=OTHER_END_SECONDS)

    def ask_all(self) -> None:
        """Asks for links with all members that can be reached; returns at once."""
        self._exchange.ask(self._purpose, set(self._members) - {self._exchange.rank})

    def refuse_from_now(self, failure: GroupError) -> None:
        """The group has failed: from now on, members that ask for a link are told how."""
        self._exchange.refuse_from_now(failure)


def _failure_of(
    error: SealringError, rank: int, members: Sequence[int], own: int
) -> _native.Failure:
    """The failure with which a group ends if a link with `rank` cannot be made."""

    def place(number: int | None) -> int:
        return members.index(number) if number in members else -1

    codes = _native.FailureCode
    if isinstance(error, GroupEnded) and error.failure is not None:
        ended = error.failure
        code = next(code for code, kind in ERROR_BY_CODE.items() if type(ended) is kind)
        # As with an alert, this worker cannot be the witness, whatever the peer says.
        possible = ended.reported_by in members and ended.reported_by != own
        witness = ended.reported_by if possible else error.peer
        told = (place(ended.peer), ended.collective or 0, place(witness), place(error.peer))
        return _native.Failure(code, str(ended), *told)
    out = isinstance(error, NoLongerAdmitted) or error.code in _OUT
    code = codes.NO_LONGER_ADMITTED if out else codes.PEER_LOST
    why = f"no link could be made: {named(error)}: {error}"
    return _native.Failure(code, why[:500], place(rank))


def hand_over_late(native: _native.Endpoint, peer: int, link: Link) -> Rest | None:
    """Gives a link that was made later to the native core; then wipes the link's own keys.

    If the group has ended, returns a function that tells the peer how.
    """
    own, theirs = (None, None) if link.memory is None else link.memory
    keys = (link.send_key, link.receive_key)
    with NoFork():  # as in hand_over
        dismissal = native.add_late_link(peer, link.socket.detach(), own, theirs, *keys)
    link.send_key.wipe()
    link.receive_key.wipe()
    return None if dismissal is None else dismissal.say
