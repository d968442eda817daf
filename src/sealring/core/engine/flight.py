"""The flight recorder: the last collectives and messages of one group, also those that still run.

Every collective writes to it, so it must be cheap: one small object per collective, no lock. A
group's collectives run one at a time, in the order called. Messages may overtake each other and may
end on any thread, so the poster of a message keeps its entry until the message ends.

Observers read the recorder at any time, from any thread. Nothing here may fail a collective.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic_ns, time_ns
from typing import TYPE_CHECKING, Final, Literal, Protocol

from sealring.core.engine.collective import ReduceKind
from sealring.errors import named

if TYPE_CHECKING:
    from sealring._native import Account, MailAccount
    from sealring.core.engine.collective import Collective, DType
    from sealring.core.engine.cuda.wires import Wire
    from sealring.core.engine.endpoint import LinkTraffic
    from sealring.core.engine.link_ends import LinkSocket
    from sealring.core.schedule import Operation

KEPT: Final = 1000
"""How many ended collectives a group's recorder keeps, and how many ended messages."""

_ROOTED: Final = frozenset({"BROADCAST", "REDUCE", "GATHER", "SCATTER", "OBJECTION"})

State = Literal["queued", "running", "done", "failed"]


@dataclass(frozen=True, slots=True)
class CollectiveAccount:
    """A collective as this rank saw it.

    Times are nanoseconds since 1970 by this host's clock; None for what has not happened yet.
    """

    number: int | None
    """The collective's number, equal on all ranks of the group; None while it is queued."""
    operation: str
    algorithm: str
    bytes: int | None
    dtype: str
    reduction: str | None
    root: int | None
    state: State
    queued_ns: int
    started_ns: int | None
    ended_ns: int | None
    sealed_bytes: int
    opened_bytes: int
    error: str | None
    """Class and text of the exception; None if it has not failed."""


@dataclass(frozen=True, slots=True)
class MessageAccount:
    """A send or a receive as this rank saw it."""

    operation: Literal["send", "recv"]
    peer: int | None
    """The rank of the group at the other end; None while a receive from anyone waits."""
    tag: int
    bytes: int
    dtype: str
    state: Literal["waiting", "done", "failed"]
    posted_ns: int
    ended_ns: int | None
    error: str | None
    """Class and text of the exception; None if it has not failed."""


@dataclass(frozen=True, slots=True)
class GroupAccount:
    id: str
    """Equal on all ranks; no other group has it, not even a later group of the same name."""
    name: str
    rank: int
    """Within the group."""
    members: list[int]
    """The number in the job of each rank of the group."""
    state: Literal["open", "failed", "closed"]
    sealed_bytes: int
    opened_bytes: int
    rekeys: int
    waited_s: list[float]
    """Seconds that this rank waited for each rank of the group."""
    collectives: list[CollectiveAccount]
    messages: list[MessageAccount]

    def collective(self, number: int) -> CollectiveAccount | None:
        """Collective `number` as this rank saw it; None if it is no longer recorded."""
        return next((each for each in self.collectives if each.number == number), None)


Way = Literal["send", "recv"]


class MailAccountable(Protocol):
    """The parts of a mailbox that the recorder uses."""

    @property
    def link_sockets(self) -> list[LinkSocket]: ...
    def account(self) -> MailAccount: ...
    def commitments(self) -> list[LinkTraffic]: ...


class MessageEntry:
    """One message. Holds no reference to its memory."""

    __slots__ = ("bytes", "dtype", "ended_ns", "error", "peer", "posted_ns", "tag", "way")

    def __init__(self, way: Way, peer: int, tag: int, nbytes: int, dtype: DType) -> None:
        self.way = way
        self.peer = peer
        self.tag = tag
        self.bytes = nbytes
        self.dtype = dtype
        self.posted_ns = monotonic_ns()
        self.ended_ns = 0
        self.error: str | None = None

    def account(self, since_1970_ns: int) -> MessageAccount:
        ended = "failed" if self.error is not None else "done"
        return MessageAccount(
            operation=self.way,
            peer=self.peer if self.peer >= 0 else None,
            tag=self.tag,
            bytes=self.bytes,
            dtype=self.dtype.name.lower(),
            state=ended if self.ended_ns else "waiting",  # type: ignore[arg-type]
            posted_ns=since_1970_ns + self.posted_ns,
            ended_ns=since_1970_ns + self.ended_ns if self.ended_ns else None,
            error=self.error,
        )


class MailRecorder:
    def __init__(self, mailbox: MailAccountable) -> None:
        self.finished: dict[Way, int] = {}
        """How many sends and receives of this rank have succeeded."""
        self._mailbox: MailAccountable | None = mailbox
        self._last_account = mailbox.account()
        self._last_commitments: list[LinkTraffic] = []
        self._lock = threading.Lock()
        self._ended: deque[MessageEntry] = deque(maxlen=KEPT)
        self._under_way: dict[MessageEntry, None] = {}

    def posted(self, entry: MessageEntry) -> None:
        with self._lock:
            self._under_way[entry] = None

    def ended(self, entry: MessageEntry, peer: int | None, error: BaseException | None) -> None:
        """Records the end of a message. A receive from anyone learns its `peer` only now."""
        with self._lock:
            if peer is not None:
                entry.peer = peer
            if error is not None:
                entry.error = f"{named(error)}: {error}"
            else:
                self.finished[entry.way] = self.finished.get(entry.way, 0) + 1
            entry.ended_ns = monotonic_ns()
            self._under_way.pop(entry, None)
            self._ended.append(entry)

    def close(self) -> None:
        """Called when the group has ended: keeps the last account and drops the mailbox."""
        self._last_account = self.account()
        self._last_commitments = self.commitments()
        self._mailbox = None

    def account(self) -> MailAccount:
        mailbox = self._mailbox
        return self._last_account if mailbox is None else mailbox.account()

    def commitments(self) -> list[LinkTraffic]:
        mailbox = self._mailbox
        return self._last_commitments if mailbox is None else mailbox.commitments()

    def link_sockets(self) -> list[LinkSocket]:
        mailbox = self._mailbox
        return [] if mailbox is None else list(mailbox.link_sockets)

    def messages(self, since_1970_ns: int) -> list[MessageAccount]:
        """The recorded messages, in the order they were posted."""
        with self._lock:
            known = [*self._ended, *self._under_way]
        return [each.account(since_1970_ns) for each in sorted(known, key=lambda e: e.posted_ns)]


class Accountable(Protocol):
    """The parts of an engine that the recorder uses."""

    @property
    def link_sockets(self) -> list[LinkSocket]: ...
    @property
    def wire(self) -> Wire | None: ...
    def account(self) -> Account: ...
    def sealed_and_opened(self) -> tuple[int, int]: ...
    def commitments(self) -> list[LinkTraffic]: ...


class Entry:
    """One collective. Holds no tensor, address or exception, which would live as long as the
    entry."""

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
        """The account with wall-clock times. `since_1970_ns` is the zero of the monotonic clock."""
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
    ) -> None:
        self.job = job
        self.job_rank = job_rank
        self.group = group
        self.members = members
        self.finished: dict[Operation, int] = {}
        """Successful calls by operation. A call may run several collectives, and the group also
        runs collectives of its own, which are not counted."""
        self.failed: dict[str, int] = {}
        """Failed collectives and messages, by the error's class."""
        self.mail = MailRecorder(mailbox)
        self._failing = threading.Lock()
        self.closed = False
        self.made_ns = monotonic_ns()
        self.last_error: tuple[str, int] | None = None
        """Class and text of the last error, and its time by the monotonic clock."""
        self.group_id = group_id
        self.epoch = epoch
        self.on_failure: Callable[[], None] | None = None
        """Called once, when the first collective or message of the group fails."""
        self._engine: Accountable | None = engine
        self._last_account = engine.account()
        self._last_commitments: list[LinkTraffic] = []
        self._sealed, self._opened = engine.sealed_and_opened()
        # In separate containers, so that waiting calls cannot displace one that has failed.
        self._ended: deque[Entry] = deque(maxlen=KEPT)
        self._waiting: dict[int, Entry] = {}
        self._running: Entry | None = None

    # ---- called by the group

    def queued(self, call: int, collective: Collective) -> None:
        self._waiting[call] = Entry(collective, monotonic_ns())

    def started(self, call: int, number: int, collective: Collective) -> None:
        """Collective `number` begins. A call may run several, one after the other."""
        now = monotonic_ns()
        # A prepared call that is run again (most small ones) was not queued: nothing waits.
        entry = (self._waiting and self._waiting.get(call)) or Entry(collective, now)
        entry.number = number
        entry.started_ns = now
        # For a moment the entry is in two places: a reader must always find it in one.
        self._running = entry
        if self._waiting:
            self._waiting.pop(call, None)

    def ended(self, error: BaseException | None) -> None:
        """The running collective has ended."""
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
                entry.error = f"{named(error)}: {error}"
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
            name = named(error)
            self.failed[name] = self.failed.get(name, 0) + 1
            self.last_error = (f"{name}: {error}", monotonic_ns())
        if first and self.on_failure is not None:
            self.on_failure()

    def close(self) -> None:
        """Called when the group has ended: keeps the last account and drops the engine."""
        self._last_account = self.engine_account()
        self._last_commitments = self.commitments()
        self._engine = None
        self.mail.close()
        self.closed = True

    # ---- called by observers, at any time, from any thread

    @property
    def state(self) -> Literal["open", "failed", "closed"]:
        return "failed" if self.failed else "closed" if self.closed else "open"

    def engine_account(self) -> Account:
        """The engine's account; after the group has ended, the last one."""
        engine = self._engine
        return self._last_account if engine is None else engine.account()

    def commitments(self) -> list[LinkTraffic]:
        """The traffic of the links for collectives; `mail` has that of the links for messages."""
        engine = self._engine
        return self._last_commitments if engine is None else engine.commitments()

    def link_sockets(self) -> list[LinkSocket]:
        """The sockets of all links, for collectives and for messages; [] after the group ended."""
        engine = self._engine
        ends = [] if engine is None else list(engine.link_sockets)
        return ends + self.mail.link_sockets()

    def gpu_wire(self) -> str | None:
        """The way of records between GPUs; None before the ranks agreed and after the group
        ended."""
        engine = self._engine
        return None if engine is None or engine.wire is None else str(engine.wire)

    def sealed_and_opened(self) -> tuple[int, int]:
        """(sealed, opened) plaintext bytes of all collectives and messages."""
        engine, mail = self.engine_account(), self.mail.account()
        return (
            engine["sealed_bytes"] + mail["sealed_bytes"],
            engine["opened_bytes"] + mail["opened_bytes"],
        )

    def collective(self, number: int) -> CollectiveAccount | None:
        """Collective `number` as this rank saw it; None if it is no longer recorded."""
        for entry in reversed(self._entries()):
            if entry.number == number:
                return entry.account(monotonic_zero_ns())
        return None

    def account(self, since_1970_ns: int | None = None) -> GroupAccount:
        """The account as of now. Give accounts of several groups one `since_1970_ns`, so that their
        times are comparable."""
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
        """The entries in the order in which they begin. The GIL makes each copy consistent."""
        waiting, running, ended = list(self._waiting.values()), self._running, list(self._ended)
        return list(dict.fromkeys([*ended, *([running] if running else []), *waiting]))


def monotonic_zero_ns() -> int:
    """The zero of the monotonic clock in nanoseconds since 1970, by the wall clock now."""
    return time_ns() - monotonic_ns()
