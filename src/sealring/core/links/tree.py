"""A round along the tree over a group's members: what each says reaches all of them.

A member collects what its subtree says and sends it up; the root sends all of it down. A member
sends its message of the first round when all its first links are there, and passes the last round's
message down when the group exists for it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeAlias, TypeVar

from sealring import _native
from sealring.core.handshake.statements import MAX_STATEMENT_BYTES, encode_bundle, parse_bundle
from sealring.core.identity.kept_key import Erased
from sealring.errors import HandshakeError, MalformedSetup, WrongPeer

Result = TypeVar("Result")

_UP: Final = 1
_DOWN: Final = 2
_AGREED: Final = 3
"""Down in the last round: the group exists for the sender. Its transcript precedes the entries."""
_TRANSCRIPT_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class LastRound:
    """This member's message of the last round, and what it is about."""

    message: bytes | bytearray
    transcript: bytes


Rounds: TypeAlias = Generator[bytes | bytearray | LastRound, Mapping[int, bytearray], Result]
"""Yields this member's message of a round; is sent all members' messages of it, by rank."""


@dataclass(frozen=True, slots=True)
class Place:
    """A member's place in the tree over the group's ranks in ascending order."""

    parent: int | None
    children: tuple[int, ...]
    subtrees: Mapping[int, frozenset[int]]
    """The members below each child, itself included."""


def place_in_tree(members: Sequence[int], rank: int) -> Place:
    """A binomial tree: a member's parent has its lowest set bit cleared. So a parent is lower."""
    ordered = sorted(members)
    at = ordered.index(rank)
    reach = at & -at if at else 1 << len(ordered).bit_length()
    steps = [1 << bit for bit in range(reach.bit_length() - 1) if at + (1 << bit) < len(ordered)]
    subtrees = {ordered[at + step]: frozenset(ordered[at + step : at + 2 * step]) for step in steps}
    return Place(ordered[at - reach] if at else None, tuple(subtrees), subtrees)


class TreeExchange(Generic[Result]):
    """Carries a conversation's rounds up and down the tree. One thread uses it."""

    def __init__(
        self,
        members: Sequence[int],
        rank: int,
        conversation: Rounds[Result],
        send: Callable[[int, bytearray], None],
    ) -> None:
        """`send` takes a rank and a message for it, which is overwritten afterwards."""
        self._members = frozenset(members)
        self._rank = rank
        self._place = place_in_tree(members, rank)
        self._conversation = conversation
        self._send = send
        self._collected: dict[int, bytes | bytearray] = {}
        self._awaited = set(self._place.children)
        self.started = False
        self._sent_up = False
        self._last: bytes | None = None
        """In the last round: its transcript."""
        self._passed_on = b""
        self.result: Result | None = None
        """What the conversation came to, once it is done."""

    @property
    def neighbours(self) -> frozenset[int]:
        parent = self._place.parent
        return frozenset([*self._place.children, *([] if parent is None else [parent])])

    @property
    def children(self) -> tuple[int, ...]:
        return self._place.children

    @property
    def parent(self) -> int | None:
        return self._place.parent

    @property
    def has_heard_all_below(self) -> bool:
        """Of the present round."""
        return not self._awaited

    def awaited(self) -> list[int]:
        """The neighbours without whose message this member cannot go on."""
        parent = self._place.parent
        return sorted(self._awaited) or ([] if parent is None else [parent])

    def timeout_weight(self) -> float:
        """From 0 to 1: how many members may be between this one and the one that all wait for.

        It is 0 for a member that waits for a leaf of the tree. Those that wait for their parents
        come after all that wait for their children, from the root's children on downwards.
        """
        height = max(1, (len(self._members) - 1).bit_length())
        if self._awaited:
            below = max(len(self._place.subtrees[child]) for child in self._awaited)
            return (below - 1).bit_length() / (2 * height)
        above = sorted(self._members).index(self._rank).bit_count()
        return (height + above) / (2 * height)

    def start(self) -> None:
        """All first links of this member are there. Those below may have sent theirs before."""
        self.started = True
        self._say(next(self._conversation))

    def take(self, sender: int, raw: bytearray) -> None:
        """A message of a neighbour in the tree, which is overwritten."""
        with Erased(raw):
            kind = raw[0]
            start = 1 + (_TRANSCRIPT_BYTES if kind == _AGREED else 0)
            try:
                transcript, entries = bytes(raw[1:start]), parse_bundle(raw, start)
            except MalformedSetup as problem:
                raise _malformed(sender, f"sent what cannot be read: {problem}") from None
        if kind == _UP and sender in self._awaited:
            if entries.keys() != self._place.subtrees[sender]:
                raise _malformed(sender, "spoke for other members than those below it")
            self._awaited.remove(sender)
            self._collected.update(entries)
            self.go_on()
        elif kind == self._kind_down and sender == self._place.parent and self._sent_up:
            if transcript != (self._last or b""):
                raise other_transcript(sender, self._rank)
            if entries.keys() != self._members:
                raise _malformed(sender, "did not pass on every member's message")
            self._finish_round(entries)
        else:
            raise _malformed(sender, "is out of step in set-up")

    def pass_on(self, child: int) -> None:
        """The last round's message: the group exists for this member."""
        self._send(child, bytearray(self._passed_on))

    @property
    def _kind_down(self) -> int:
        return _DOWN if self._last is None else _AGREED

    def _say(self, own: bytes | bytearray | LastRound) -> None:
        if isinstance(own, LastRound):
            self._last, own = own.transcript, own.message
        self._collected[self._rank] = own
        self.go_on()

    def go_on(self) -> None:
        if self._awaited or not self.started:
            return
        if self._place.parent is None:
            everything = {rank: bytearray(entry) for rank, entry in self._collected.items()}
            self._finish_round(everything)
        else:
            self._sent_up = True
            self._send(self._place.parent, _message(_UP, self._collected))

    def _finish_round(self, entries: dict[int, bytearray]) -> None:
        collected = self._collected
        # All that was sent up, before it is passed down: then a member's parent that shows it
        # changed words of its own has changed them itself, and not a member further away.
        for rank, entry in collected.items():
            if entries[rank] != entry:
                raise _malformed(self._place.parent, f"changed what rank {rank} had said")
        if self._last is not None:
            self._passed_on = bytes(encode_bundle(entries, bytes([_AGREED]) + self._last))
        else:
            # Before this member verifies them: those below do so at the same time.
            for child in self._place.children:
                self._send(child, _message(_DOWN, entries))
        try:
            following = self._conversation.send(entries)
        except StopIteration as ended:
            self.result = ended.value
        except HandshakeError as error:
            if error.peer in (None, self._rank, *self.neighbours):
                raise
            raise self._reported(error) from error
        except MemoryError:
            raise
        except Exception as problem:  # certificates are parsed by libraries whose errors are many
            what = f"a member's message cannot be read: {problem!r}"
            raise MalformedSetup(what[:300], peer=self._place.parent) from problem
        else:
            self._collected = {}
            self._awaited = set(self._place.children)
            self._sent_up = False
            self._say(following)
        finally:
            _native.erase_each((*entries.values(), *collected.values()))

    def _reported(self, error: HandshakeError) -> HandshakeError:
        """The error of a message that was passed on: its author or a member between changed it.

        What is certain is which neighbour it came from.
        """
        below = (child for child, tree in self._place.subtrees.items() if error.peer in tree)
        neighbour = next(below, self._place.parent)
        text = f"{error} (reported by rank {neighbour}, and not by rank {error.peer} itself)"
        return type(error)(text, peer=neighbour, code=error.code)


def _message(kind: int, entries: Mapping[int, bytes | bytearray]) -> bytearray:
    return encode_bundle(entries, bytes([kind]))


def most_bytes(members: int) -> int:
    """A message of a round is no longer than this."""
    return 1 + _TRANSCRIPT_BYTES + members * (MAX_STATEMENT_BYTES + 8)


def other_transcript(sender: int, own: int) -> WrongPeer:
    return WrongPeer(
        f"rank {sender} and rank {own} do not confirm the same transcript",
        peer=sender,
        proven=True,
        code="handshake.wrong_group",
    )


def _malformed(sender: int | None, what: str) -> HandshakeError:
    return MalformedSetup(f"rank {sender} {what}", peer=sender, proven=True)
