"""What neighbours say when a member's first links are there: who is linked, the rounds, ready.

linked   which processes this member is linked with
rounds   the members agree along the tree (forming.py), in three rounds
ready    the transcript of that; records may follow it at once

When the rounds are done the group exists for this member, and no error ends the set-up any more: a
neighbour that is lost before its "ready" is lost to the group, which says so in its first
collective.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from sealring.errors import DuplicateRank, MalformedSetup, SealringError, WrongGroup
from sealring.handshake.messages import Message, digest, exactly, instances
from sealring.handshake.terms import Terms
from sealring.links.forming import Agreed, Conversation, Proven, TreeExchange, most_bytes
from sealring.links.waiting import WaitingLink

_LOG = logging.getLogger("sealring")

_LINKED: Final = frozenset({"type", "instances"})
_READY: Final = frozenset({"type", "transcript"})


class Settling:
    """One attempt's. One thread uses it."""

    def __init__(self, terms: Terms, deadline: float) -> None:
        self._terms = terms
        self._deadline = deadline
        self.linked: dict[int, str] = {}
        """The instance of each member that this worker is linked with, once all first links are."""
        self.proven: dict[int, Proven] = {}
        """What each of them proved."""
        self._exchange: TreeExchange | None = None
        self._early: dict[int, bytearray] = {}
        """Messages of neighbours whose links were complete before this worker's, by rank."""

    def say_linked(self, links: list[WaitingLink]) -> None:
        """Tell every neighbour which processes this worker is linked with.

        Where two workers hold one rank and connections are cut, a rank can be linked to one of them
        and the next rank to the other.
        """
        self.linked = {link.rank: link.channel.peer_hello.instance for link in links}
        self.proven = {
            link.rank: Proven(link.channel.peer_hello.instance, link.channel.peer.key)
            for link in links
        }
        said = {str(rank): instance for rank, instance in self.linked.items()}
        for link in links:
            link.channel.send({"type": "linked", "instances": said}, self._deadline)
            self._check_linked(link)

    def start(self, links: list[WaitingLink], conversation: Conversation) -> None:
        by_rank = {link.rank: link for link in links}

        def send(rank: int, message: bytearray) -> None:
            by_rank[rank].channel.send_raw(message, self._deadline)

        self._exchange = TreeExchange(self._terms.members, self._terms.rank, conversation, send)
        self._exchange.start()
        for rank, message in self._early.items():
            with _laid_to(rank):
                self._exchange.take(rank, message)
        self._early.clear()

    @property
    def agreed(self) -> Agreed | None:
        """What the members have agreed on, once they have."""
        return None if self._exchange is None else self._exchange.result

    @property
    def exchange(self) -> TreeExchange | None:
        return self._exchange

    def hear(self, link: WaitingLink) -> None:
        """Take the next message of a neighbour, before the members have agreed."""
        most = most_bytes(len(self._terms.members))
        with _laid_to(link.rank):
            message = link.channel.receive_any(self._deadline, most)
            if not isinstance(message, bytearray):
                self._hear_words(link, message)
            elif self._exchange is not None:
                self._exchange.take(link.rank, message)
            elif link.rank not in self._early:
                self._early[link.rank] = message
            else:
                raise _out_of_step(link)

    def _hear_words(self, link: WaitingLink, message: Message) -> None:
        if message["type"] == "linked" and not link.linked:
            exactly(message, _LINKED)
            link.linked = instances(message, "instances")
            self._check_linked(link)
        elif message["type"] == "ready" and link.linked and self._may_be_ready(link):
            exactly(message, _READY)
            link.ready = digest(message, "transcript")
        else:
            raise _out_of_step(link)

    def _may_be_ready(self, link: WaitingLink) -> bool:
        """One that is not in the tree may hear the last confirmation before this worker does."""
        return self._exchange is not None and (
            self._exchange.result is not None or link.rank not in self._exchange.neighbours
        )

    def check_ready(self, links: list[WaitingLink]) -> None:
        """That neighbours which said so before this worker agreed on the same."""
        for link in links:
            if link.ready:
                self._check_transcript(link)

    def say_ready(self, links: list[WaitingLink]) -> None:
        """After this nothing but records may follow on a link: its peer reads no other bytes."""
        assert self.agreed is not None
        transcript = self.agreed.transcript.hex()
        for link in links:
            try:
                link.channel.send({"type": "ready", "transcript": transcript}, self._deadline)
            except SealringError as error:
                self.lose(link, str(error))
            link.channel.say_no_more()

    def hear_ready(self, link: WaitingLink) -> None:
        """Take what should be a neighbour's "ready"; for anything else the link is lost.

        Of one that is not in the tree, "linked" may still be on its way before that.
        """
        try:
            with _laid_to(link.rank):
                self._hear_words(link, link.channel.receive(self._deadline))
                if link.ready:
                    self._check_transcript(link)
        except SealringError as error:
            self.lose(link, str(error))

    def lose(self, link: WaitingLink, why: str) -> None:
        """The group finds this link's end in its first collective, and names the neighbour.

        The log gets a text: an error's traceback refers to the caller's variables.
        """
        _LOG.warning("sealring: rank %d was lost while the group formed: %s", link.rank, why)
        link.lost = True
        with suppress(OSError):
            link.channel.socket.shutdown(socket.SHUT_RDWR)

    def _check_transcript(self, link: WaitingLink) -> None:
        assert self.agreed is not None
        if link.ready != self.agreed.transcript.hex():
            raise WrongGroup(
                f"rank {link.rank} and rank {self._terms.rank} do not confirm the same transcript",
                peer=link.rank,
                proven=True,
            )

    def _check_linked(self, link: WaitingLink) -> None:
        for rank, instance in link.linked.items():
            if self.linked.get(rank, instance) != instance:
                raise DuplicateRank(
                    f"rank {link.rank} and rank {self._terms.rank} are linked to different workers "
                    f"of rank {rank}: two workers were started with one RANK, or an earlier run is "
                    "still alive",
                    peer=link.rank,
                    proven=True,
                )


@contextmanager
def _laid_to(rank: int) -> Iterator[None]:
    """In it, a message that cannot be taken is MalformedSetup about the neighbour that sent it.

    Certificates that other members made are parsed by libraries whose errors are many.
    """
    try:
        yield
    except (SealringError, MemoryError):
        raise
    except Exception as problem:
        raise MalformedSetup(
            f"rank {rank} sent or passed on what cannot be read: {problem!r}"[:300],
            peer=rank,
            proven=True,
        ) from problem


def _out_of_step(link: WaitingLink) -> MalformedSetup:
    return MalformedSetup(f"rank {link.rank} is out of step in set-up", peer=link.rank, proven=True)
