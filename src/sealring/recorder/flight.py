"""The last collectives of one group: those that ended, the one under way, those that wait.

Written on every collective, so kept cheap: one small object, no lock. Collectives of a group run
one at a time, in the order called.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic_ns, time_ns
from typing import TYPE_CHECKING, Final, Literal, Protocol

from sealring.engine.datatypes import ReduceKind
from sealring.recorder.account import CollectiveAccount, GroupAccount, State
from sealring.recorder.mail import MailAccountable, MailRecorder, MessageEntry

if TYPE_CHECKING:
    from sealring._native import Account
    from sealring.engine.collective import Collective
    from sealring.engine.endpoint import LinkTraffic
    from sealring.schedule import Operation

KEPT: Final = 1000
"""Collectives per group that have ended."""

_ROOTED: Final = frozenset({"BROADCAST", "REDUCE", "GATHER", "SCATTER", "OBJECTION"})


class Accountable(Protocol):
    """What is asked of an engine."""

    def account(self) -> Account: ...
    def sealed_and_opened(self) -> tuple[int, int]: ...
    def commitments(self) -> list[LinkTraffic]: ...


class Entry:
    """One collective. Holds no tensor, no address and no exception: those would live on with it."""

    __slots__ = (
        "algorithm", "bytes", "dtype", "ended_ns", "error", "number", "opened_bytes", "operation",
        "queued_ns", "reduction", "root", "sealed_bytes", "started_ns",
    )  # fmt: skip

    def __init__(self, collective: Collective, queued_ns: int) -> None:
        self.operation = collective.operation
        self.algorithm = collective.algorithm
        self.bytes = collective.total
        self.dtype = collective.dtype
        self.reduction = collective.reduction
        self.root = collective.root
        self.queued_ns = queued_ns
        self.number = self.started_ns = self.ended_ns = 0
        self.sealed_bytes = self.opened_bytes = 0
        self.error: str | None = None

    @property
    def state(self) -> State:
        if self.error is not None:
            return "failed"
        return "done" if self.ended_ns else "running" if self.started_ns else "queued"

    def account(self, since_1970_ns: int) -> CollectiveAccount:
        """With times by the wall clock, which was `since_1970_ns` at the monotonic one's zero."""
        reduces = self.reduction is not ReduceKind.NONE
        return CollectiveAccount(
            number=self.number or None,
            operation=self.operation.name.lower(),
            algorithm=self.algorithm.name.lower(),
            bytes=self.bytes,
            dtype=self.dtype.name.lower(),
            reduction=self.reduction.name.lower() if reduces else None,
            root=self.root if self.operation.name in _ROOTED else None,
            state=self.state,
            queued_ns=since_1970_ns + self.queued_ns,
            started_ns=since_1970_ns + self.started_ns if self.started_ns else None,
            ended_ns=since_1970_ns + self.ended_ns if self.ended_ns else None,
            sealed_bytes=self.sealed_bytes,
            opened_bytes=self.opened_bytes,
            error=self.error,
        )


class FlightRecorder:
    def __init__(
        self,
        engine: Accountable,
        mailbox: MailAccountable,
        *,
        job: str,
        job_rank: int,
        group: str,
        group_id: str,
        epoch: str,
        members: tuple[int, ...],
        on_failure: Callable[[], None],
    ) -> None:
        self.job = job
        self.job_rank = job_rank
        self.group = group
        self.members = members
        self.finished: dict[Operation, int] = {}
        """Calls that went well, by what was called: one may be several collectives, and the group
        has collectives of its own."""
        self.failed: dict[str, int] = {}
        """Those that did not, and messages, by the error's class."""
        self.mail = MailRecorder(mailbox)
        self._failing = threading.Lock()
        self.closed = False
        self.made_ns = monotonic_ns()
        self.last_error: tuple[str, int] | None = None
        """Its class and text, and when it came, by the monotonic clock."""
        self.group_id = group_id
        self.epoch = epoch
        self.reported = False
        """A statement of this run has the account of the group after its end."""
        self._on_failure = on_failure
        self._engine: Accountable | None = engine
        self._last_account = engine.account()
        self._last_commitments: list[LinkTraffic] = []
        self._sealed, self._opened = engine.sealed_and_opened()
        # Apart from each other: however many wait, the one that fails is in the record.
        self._ended: deque[Entry] = deque(maxlen=KEPT)
        self._waiting: dict[int, Entry] = {}
        self._running: Entry | None = None

    # ---- called by the group: the first three once each for every collective

    def queued(self, call: int, collective: Collective) -> None:
        self._waiting[call] = Entry(collective, monotonic_ns())

    def started(self, call: int, number: int, collective: Collective) -> None:
        """Collective `number` begins. A call may run more than one; they follow one another."""
        now = monotonic_ns()
        # None waits when a call is run again, as small ones mostly are.
        entry = (self._waiting and self._waiting.get(call)) or Entry(collective, now)
        entry.number = number
        entry.started_ns = now
        # In two places for a moment rather than in none: somebody may be reading.
        self._running = entry
        if self._waiting:
            self._waiting.pop(call, None)

    def ended(self, error: BaseException | None) -> None:
        """The running one has ended. The first error of a group is told to `on_failure`."""
        entry = self._running
        if entry is not None:
            if self._engine is not None:
                sealed, opened = self._engine.sealed_and_opened()
                entry.sealed_bytes, entry.opened_bytes = (
                    sealed - self._sealed,
                    opened - self._opened,
                )
                self._sealed, self._opened = sealed, opened
            entry.ended_ns = monotonic_ns()
            if error is not None:
                entry.error = f"{type(error).__name__}: {error}"
            self._ended.append(entry)
            self._running = None
        if error is not None:
            self._count_failure(error)

    def call_done(self, operation: Operation) -> None:
        self.finished[operation] = self.finished.get(operation, 0) + 1

    def message_ended(
        self, entry: MessageEntry, peer: int | None, error: BaseException | None
    ) -> None:
        self.mail.ended(entry, peer, error)
        if error is not None:
            self._count_failure(error)

    def _count_failure(self, error: BaseException) -> None:
        with self._failing:  # a collective and a message may fail at once
            first = not self.failed
            name = type(error).__name__
            self.failed[name] = self.failed.get(name, 0) + 1
            self.last_error = (f"{name}: {error}", monotonic_ns())
        if first:
            self._on_failure()

    def close(self) -> None:
        """The group has ended: keeps its last account and lets go of the engine."""
        self._last_account = self.engine_account()
        self._last_commitments = self.commitments()
        self._engine = None
        self.mail.close()
        self.closed = True

    # ---- asked by others, at any time, from any thread

    @property
    def state(self) -> Literal["open", "failed", "closed"]:
        return "failed" if self.failed else "closed" if self.closed else "open"

    def engine_account(self) -> Account:
        """As of the last collective that ended."""
        engine = self._engine
        return self._last_account if engine is None else engine.account()

    def commitments(self) -> list[LinkTraffic]:
        """Of the links of collectives; those of messages are `mail`'s."""
        engine = self._engine
        return self._last_commitments if engine is None else engine.commitments()

    def sealed_and_opened(self) -> tuple[int, int]:
        """Plaintext bytes, in collectives and in messages."""
        engine, mail = self.engine_account(), self.mail.account()
        return (
            engine["sealed_bytes"] + mail["sealed_bytes"],
            engine["opened_bytes"] + mail["opened_bytes"],
        )

    def collective(self, number: int) -> CollectiveAccount | None:
        """What collective `number` was on this rank, if it is among those kept."""
        for entry in reversed(self._entries()):
            if entry.number == number:
                return entry.account(monotonic_zero_ns())
        return None

    def account(self, since_1970_ns: int | None = None) -> GroupAccount:
        """As of now. Accounts of several groups take one `since_1970_ns`, so that they fit."""
        engine = self.engine_account()
        sealed, opened = self.sealed_and_opened()
        zero = monotonic_zero_ns() if since_1970_ns is None else since_1970_ns
        return GroupAccount(
            id=self.group_id,
            name=self.group,
            rank=self.members.index(self.job_rank),
            members=list(self.members),
            state=self.state,
            sealed_bytes=sealed,
            opened_bytes=opened,
            rekeys=sum(engine["rekeys"]),
            waited_s=engine["waited_s"],
            collectives=[entry.account(zero) for entry in self._entries()],
            messages=self.mail.messages(zero),
        )

    def _entries(self) -> list[Entry]:
        """In the order they began, or will. The GIL makes each copy whole."""
        waiting, running, ended = list(self._waiting.values()), self._running, list(self._ended)
        return list(dict.fromkeys([*ended, *([running] if running else []), *waiting]))


def monotonic_zero_ns() -> int:
    """When the monotonic clock was zero, by the wall clock as it is now."""
    return time_ns() - monotonic_ns()
