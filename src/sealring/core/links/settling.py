"""What neighbours say when a member's first links are there: who is linked, the rounds, ready.

linked   which processes this member is linked with, where neighbours have neighbours in common
rounds   the members agree along the tree (forming.py), in three rounds
ready    the transcript of that; records may follow it at once

To those below it in the tree a member says "ready" by the last round's message. When the rounds are
done the group exists for this member, and no error ends the set-up any more: a neighbour that is
lost before its "ready" is lost to the group, which says so in its first collective.
"""

from __future__ import annotations

import logging
import socket
from contextlib import suppress
from typing import Final

from sealring.core.handshake.messages import Message, digest, exactly, instances
from sealring.core.handshake.terms import Terms
from sealring.core.links.connections import WaitingLink
from sealring.core.links.forming import Agreed, Conversation, Proven
from sealring.core.links.tree import TreeExchange, most_bytes, other_transcript
from sealring.errors import DuplicateRank, MalformedSetup, SealringError
from sealring.limits import MAX_SETUP_BYTES

_LOG = logging.getLogger("sealring")

_LINKED: Final = frozenset({"type", "instances"})
_READY: Final = frozenset({"type", "transcript"})


class Settling:
    """One attempt's. One thread uses it."""

    def __init__(self, terms: Terms, deadline: float, *, sparse: bool) -> None:
        """`sparse`: the first links are those of the tree."""
        self._terms = terms
        self._deadline = deadline
        self._sparse = sparse
        self.linked: dict[int, str] = {}
        """The instance of each member that this worker is linked with, once all first links are."""
        self.proven: dict[int, Proven] = {}
        """What each of them proved."""
        self._by_rank: dict[int, WaitingLink] = {}
        self._exchange: TreeExchange[Agreed] | None = None

    def start(self, conversation: Conversation) -> None:
        """Take messages of neighbours; this worker sends its own after `say_linked`."""
        self._exchange = TreeExchange(
            self._terms.members, self._terms.rank, conversation, self._send
        )

    def _send(self, rank: int, message: bytearray) -> None:
        self._by_rank[rank].channel.send_raw(message, self._deadline)

    @property
    def may_close(self) -> bool:
        """Whether this worker's next message can tell its neighbours that its links are there.

        In a tree that is its message of the first round, for which it needs those below it. Until
        then a link that is cut can be replaced, at both ends.
        """
        exchange = self.exchange
        return not exchange.started and (not self._sparse or exchange.has_heard_all_below)

    def say_linked(self, links: list[WaitingLink]) -> None:
        """All first links are there. Tell neighbours which processes this worker is linked with.

        Where two workers hold one rank and connections are cut, a rank can be linked to one of them
        and the next rank to the other. In a tree no two neighbours have a neighbour in common.
        """
        self._by_rank = {link.rank: link for link in links}
        for link in links:
            hello = link.channel.peer_hello
            self.linked[link.rank] = hello.instance
            self.proven[link.rank] = Proven(hello.instance, link.channel.peer.key)
        said = {str(rank): instance for rank, instance in self.linked.items()}
        for link in [] if self._sparse else links:
            link.channel.send({"type": "linked", "instances": said}, self._deadline)
            self._check_linked(link)
        self.exchange.start()

    @property
    def agreed(self) -> Agreed | None:
        """What the members have agreed on, once they have."""
        return None if self._exchange is None else self._exchange.result

    @property
    def exchange(self) -> TreeExchange[Agreed]:
        assert self._exchange is not None
        return self._exchange

    def hear(self, link: WaitingLink) -> None:
        """Take what has come of a neighbour's next message, before the members have agreed.

        One that says half of it holds up no other.
        """
        most = most_bytes(len(self._terms.members))
        with _LaidTo(link.rank):
            message = link.channel.heard(self._deadline, most)
            if message is None:
                return
            if isinstance(message, bytearray):
                link.closed = True
                self.exchange.take(link.rank, message)
            else:
                self._hear_words(link, message)

    def _hear_words(self, link: WaitingLink, message: Message) -> None:
        try:
            if message["type"] == "linked" and not (link.linked or self._sparse):
                exactly(message, _LINKED)
                link.closed, link.linked = True, instances(message, "instances")
            elif message["type"] == "ready" and link.closed and self._may_be_ready(link):
                exactly(message, _READY)
                link.ready = digest(message, "transcript")
            else:
                raise _out_of_step(link)
        except MalformedSetup as problem:
            if problem.peer is not None:
                raise
            # The parser knows no peers.
            said = f"rank {link.rank}: {problem}"
            raise MalformedSetup(said, peer=link.rank, proven=True) from None
        self._check_linked(link)

    def _may_be_ready(self, link: WaitingLink) -> bool:
        """One that is not in the tree may hear the last confirmation before this worker does."""
        if link.rank in self.exchange.neighbours:
            return self.exchange.result is not None and link.rank != self.exchange.parent
        return True

    def check_ready(self, links: list[WaitingLink]) -> None:
        """That neighbours which said so before this worker agreed on the same."""
        assert self.agreed is not None
        for link in links:
            if link.rank == self.exchange.parent:
                link.ready = self.agreed.transcript.hex()  # in the last round's message
            elif link.ready:
                self._check_transcript(link)

    def say_ready(self, links: list[WaitingLink]) -> None:
        """After this nothing but records may follow on a link: its peer reads no other bytes."""
        assert self.agreed is not None
        transcript = self.agreed.transcript.hex()
        for link in links:
            try:
                if link.rank in self.exchange.children:
                    self.exchange.pass_on(link.rank)
                else:
                    link.channel.send({"type": "ready", "transcript": transcript}, self._deadline)
            except SealringError as error:
                self.lose(link, str(error))
            link.channel.say_no_more()

    def hear_ready(self, link: WaitingLink) -> None:
        """Take what has come of a neighbour's "ready"; for anything else the link is lost.

        Of one that is not in the tree, "linked" may still be on its way before that.
        """
        try:
            with _LaidTo(link.rank):
                message = link.channel.heard(self._deadline, MAX_SETUP_BYTES)
                if message is None:
                    return
                if isinstance(message, bytearray):
                    raise _out_of_step(link)
                self._hear_words(link, message)
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
            raise other_transcript(link.rank, self._terms.rank)

    def _check_linked(self, link: WaitingLink) -> None:
        for rank, instance in link.linked.items():
            if self.linked.get(rank, instance) != instance:
                raise DuplicateRank(
                    f"rank {link.rank} and rank {self._terms.rank} are linked to different workers "
                    f"of rank {rank}: two workers were started with one RANK, or an earlier run is "
                    "still alive",
                    peer=link.rank,  # not proven: it is told so, or tells so
                )


class _LaidTo:
    """In it, a message that cannot be taken is MalformedSetup about the neighbour that sent it."""

    __slots__ = ("_rank",)

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, problem: BaseException | None, __: object) -> None:
        if isinstance(problem, Exception) and not isinstance(problem, SealringError | MemoryError):
            raise MalformedSetup(
                f"rank {self._rank} sent what cannot be read: {problem!r}"[:300],
                peer=self._rank,
                proven=True,
            ) from problem


def _out_of_step(link: WaitingLink) -> MalformedSetup:
    return MalformedSetup(f"rank {link.rank} is out of step in set-up", peer=link.rank, proven=True)
