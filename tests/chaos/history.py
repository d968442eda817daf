"""What happened: every rank's calls with times, inputs and outcomes, and every strike."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from sealring.errors import GroupError
from tests.chaos.plan import Call, Fault


@dataclass(frozen=True, slots=True)
class SeenError:
    """The facts of an exception, which a worker process sends to the checker."""

    name: str
    text: str
    of_the_group: bool
    """Whether it is a GroupError, as every failure of a collective must be."""
    peer: int | None
    collective: int | None
    reported_by: int | None
    """`peer` and `reported_by` are ranks of the job."""

    @property
    def facts(self) -> tuple[str, int | None, int | None, int | None]:
        """The facts that stay the same at every later call; the text names the call that got it."""
        return self.name, self.peer, self.collective, self.reported_by

    @classmethod
    def of(cls, error: BaseException) -> SeenError:
        return cls(
            type(error).__name__,
            str(error),
            isinstance(error, GroupError),
            getattr(error, "peer", None),
            getattr(error, "collective", None),
            getattr(error, "reported_by", None),
        )

    def agrees_with(self, other: SeenError) -> bool:
        """Tells whether both are reports of one failure, whichever link carried them."""
        return self.facts[:3] == other.facts[:3]


@dataclass(slots=True)
class Outcome:
    """One rank's part in one collective. All processes share the clock of the times."""

    rank: int
    """The rank in the world."""
    call: Call
    inputs: str
    """A digest of the rank's memory before the call."""
    started: float
    ended: float | None = None
    output: bytes | None = None
    """The rank's memory after a call without an error."""
    error: SeenError | None = None
    altered: bool = False
    """Whether this rank was made to call something else."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A planned fault that did strike."""

    fault: Fault
    at: float
    what: str
    must_end: bool
    """Whether no rank may go on as if nothing had happened."""


@dataclass(slots=True)
class History:
    outcomes: list[Outcome] = field(default_factory=list)
    hits: list[Hit] = field(default_factory=list)
    dead: dict[int, str] = field(default_factory=dict)
    """Ranks whose process ended, and how it ended."""
    left: set[int] = field(default_factory=set)
    """Ranks that left the group early."""
    trouble: list[str] = field(default_factory=list)
    """Problems outside of any call: in set-up, a hang, or in this harness."""
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    longest_stall_s: float = 0.0
    """The longest time for which the machine itself stood still."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def hit(self, fault: Fault, what: str, *, must_end: bool, at: float | None = None) -> None:
        when = time.monotonic() if at is None else at
        with self._lock:
            self.hits.append(Hit(fault, when, what, must_end))

    def add(self, outcome: Outcome) -> Outcome:
        with self._lock:
            self.outcomes.append(outcome)
        return outcome


def digest(bits: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(bits)).hexdigest()


class Heartbeat(threading.Thread):
    """Notices when this machine stands still, so that no rank is blamed for that."""

    def __init__(self, beat_s: float = 0.05) -> None:
        super().__init__(daemon=True, name="heartbeat")
        self._beat_s = beat_s
        self._stalls: list[tuple[float, float]] = []
        self.start()

    def run(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(self._beat_s)
            now = time.monotonic()
            if now - last > 4 * self._beat_s:
                self._stalls.append((now, now - last))
            last = now

    def longest_since(self, began: float) -> float:
        return max((length for at, length in list(self._stalls) if at >= began), default=0.0)
