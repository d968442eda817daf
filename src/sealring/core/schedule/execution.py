"""Runs the steps of all ranks in a possible order, by the rules of program.py, without data.

`check` uses this to find deadlocks. The reference engine uses it to compute results.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sealring.core.schedule.program import Action, Program, Step
from sealring.errors import ConfigurationError

SENDING = frozenset({Action.SEND, Action.PUBLISH, Action.FORWARD})
RECEIVING = frozenset({Action.RECEIVE, Action.RECEIVE_REDUCE})
_DONE = -1


def schedule_error(problem: str) -> ConfigurationError:
    return ConfigurationError(problem, code="configuration.schedule_error")


class Turn(NamedTuple):
    """One step of one rank in one segment."""

    rank: int
    segment: int
    step: int


class Link(NamedTuple):
    sender: int
    receiver: int


class Record(NamedTuple):
    """The identity of a record on a link. `origin` is -1 for a record of the pair."""

    segment: int
    origin: int
    message: int


class Execution:
    """Runs programs over links that keep records in order.

    Only the record at the head of a link can be received; it blocks those behind it until the step
    that receives it may run. With `link_records`, a link holds at most that many records, and a
    step that sends is done when its last record has found room. A rank has at most `window`
    segments open, beginning with the oldest unfinished one. segments[rank][step] is the number of
    segments in which that step exists (default 1).

    With `shuffle`, the next step is any that can run, with three limits: a rank's sends keep the
    order in which they became ready, so do its steps that need no other rank, and a step runs in
    the order of segments.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        *,
        segments: Sequence[Sequence[int]] | None = None,
        window: int = 1,
        link_records: int | None = None,
        shuffle: random.Random | None = None,
    ) -> None:
        self._programs = programs
        self._segments = segments or [[1] * len(program.steps) for program in programs]
        self._link_records = link_records
        self._shuffle = shuffle
        self._dependents = [program.dependents() for program in programs]
        self._waits: dict[tuple[int, int], list[int]] = {}
        self._undone: dict[tuple[int, int], int] = {}
        self._opened = [0] * len(programs)
        self._oldest = [0] * len(programs)
        self._window = window
        self._runnable: deque[Turn] = deque()
        self._sends: list[deque[Turn]] = [deque() for _ in programs]
        self._own: list[deque[Turn]] = [deque() for _ in programs]
        self._links: dict[Link, deque[Record]] = {}
        self._outside: dict[Link, deque[tuple[Record, Turn]]] = {}
        self._records_outside: dict[Turn, int] = {}
        self._receivers: dict[tuple[Link, Record], Turn] = {}
        for rank in range(len(programs)):
            self._open_segments(rank)

    def turns(self) -> Iterator[Turn]:
        """Yields every step of every rank in a possible order; raises configuration.schedule_error
        at a deadlock."""
        while self._runnable:
            turn = self._next()
            yield turn
            step = self._step(turn)
            if step.action in SENDING:
                self._send(turn, step)
                continue
            if step.action in RECEIVING:
                self._take_head(Link(step.peers[0], turn.rank))
            self._complete(turn)
        if self._undone:
            raise schedule_error(f"deadlock: {'; '.join(self._who_waits_for_what())}")

    def _next(self) -> Turn:
        if self._shuffle is not None:
            self._runnable.rotate(self._shuffle.randrange(len(self._runnable)))
        turn = self._runnable.popleft()
        action = self._step(turn).action
        if action in SENDING:
            return self._sends[turn.rank].popleft()
        return turn if action in RECEIVING else self._own[turn.rank].popleft()

    def _step(self, turn: Turn) -> Step:
        return self._programs[turn.rank].steps[turn.step]

    def _open_segments(self, rank: int) -> None:
        steps = self._programs[rank].steps
        if not steps:
            return
        segments = self._segments[rank]
        while self._opened[rank] < min(max(segments), self._oldest[rank] + self._window):
            segment = self._opened[rank]
            self._opened[rank] += 1
            exists = [segment < count for count in segments]
            self._undone[rank, segment] = sum(exists)
            before = self._waits.get((rank, segment - 1), [_DONE] * len(steps))
            waits = [
                sum(exists[earlier] for earlier in step.after) + (before[index] != _DONE)
                if exists[index]
                else _DONE
                for index, step in enumerate(steps)
            ]
            self._waits[rank, segment] = waits
            for index, count in enumerate(waits):
                if count == 0:
                    self._became_ready(Turn(rank, segment, index))

    def _became_ready(self, turn: Turn) -> None:
        step = self._step(turn)
        if step.action in RECEIVING:
            link = Link(step.peers[0], turn.rank)
            record = Record(turn.segment, step.origin, step.message)
            self._receivers[link, record] = turn
            if (records := self._links.get(link)) and records[0] == record:
                self._head_changed(link)
            return
        queue = self._sends if step.action in SENDING else self._own
        queue[turn.rank].append(turn)
        self._runnable.append(turn)

    def _complete(self, turn: Turn) -> None:
        rank, segment, step = turn
        self._waits[rank, segment][step] = _DONE
        for dependent in self._dependents[rank][step]:
            self._waits_for_one_less(Turn(rank, segment, dependent))
        if (rank, segment + 1) in self._waits:
            self._waits_for_one_less(Turn(rank, segment + 1, step))
        self._undone[rank, segment] -= 1
        if self._undone[rank, segment] == 0:
            del self._undone[rank, segment], self._waits[rank, segment]
            while (
                self._oldest[rank] < self._opened[rank]
                and (rank, self._oldest[rank]) not in self._undone
            ):
                self._oldest[rank] += 1
            self._open_segments(rank)

    def _waits_for_one_less(self, turn: Turn) -> None:
        waits = self._waits[turn.rank, turn.segment]
        if waits[turn.step] == _DONE:
            return  # its slot has ended before this segment
        waits[turn.step] -= 1
        if waits[turn.step] == 0:
            self._became_ready(turn)

    def _send(self, turn: Turn, step: Step) -> None:
        origin = {Action.SEND: -1, Action.PUBLISH: turn.rank}.get(step.action, step.origin)
        record = Record(turn.segment, origin, step.message)
        self._records_outside[turn] = len(step.peers)
        for peer in step.peers:
            link = Link(turn.rank, peer)
            self._outside.setdefault(link, deque()).append((record, turn))
            self._fill(link)

    def _fill(self, link: Link) -> None:
        """Moves waiting records into the link while it has room."""
        outside = self._outside.get(link)
        records = self._links.setdefault(link, deque())
        while outside and (self._link_records is None or len(records) < self._link_records):
            record, sender = outside.popleft()
            records.append(record)
            if len(records) == 1:
                self._head_changed(link)
            self._records_outside[sender] -= 1
            if self._records_outside[sender] == 0:
                del self._records_outside[sender]
                self._complete(sender)

    def _take_head(self, link: Link) -> None:
        self._links[link].popleft()
        self._head_changed(link)
        self._fill(link)

    def _head_changed(self, link: Link) -> None:
        if records := self._links[link]:
            receiver = self._receivers.pop((link, records[0]), None)
            if receiver is not None:
                self._runnable.append(receiver)

    def _who_waits_for_what(self) -> Iterator[str]:
        for (link, record), turn in sorted(self._receivers.items(), key=lambda item: item[1]):
            wanted = _describe(link.sender, record)
            if records := self._links.get(link):
                in_front = f"but {_describe(link.sender, records[0])} is in front"
            else:
                in_front = "but nothing is on the link"
            yield f"rank {turn.rank} waits in step {turn.step} for {wanted}, {in_front}"
        for turn in sorted(self._records_outside):
            yield f"rank {turn.rank} waits in step {turn.step} for room on a link"


def _describe(sender: int, record: Record) -> str:
    published = "" if record.origin < 0 else f" published by rank {record.origin}"
    return f"message {record.message}{published} from rank {sender}"
