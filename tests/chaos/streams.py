"""What each fault does to the bytes that pass over a link in one direction.

These objects stand in the middle of a link inside a process and in the proxy between processes.
They see what anyone on the path sees: first TLS, then records with plaintext headers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

from sealring.limits import SESSION_FRAME
from tests.chaos.history import History
from tests.chaos.plan import Fault, FaultKind
from tests.core.engine.attacker import Kind, Record, Splitter
from tests.core.engine.local_world import Last

_LONGEST_HOLD_S: Final = 0.3
"""A record that waits for its successor is released after this time."""
_SLOW_RECORDS: Final = 12
_SETUP_BYTES: Final = 6000
"""About how many bytes each end sends by TLS until a link is made; under a session it is less."""
_TLS_HEADER_BYTES: Final = 5
_TLS_TYPES: Final = (*range(20, 25), SESSION_FRAME)
"""TLS's own types, and a session's frame, which has the form of a TLS record."""
OF_MESSAGES: Final = (Kind.ANNOUNCE, Kind.ACCEPT, Kind.DATA)


class Strike:
    """A fault that lets records pass until its moment and then acts."""

    holds_open = False

    def __init__(self, fault: Fault, history: History) -> None:
        self.fault = fault
        self._history = history
        self._skip = fault.skip
        self.struck = False
        self.over = False
        """Set when the traffic has ended: nothing strikes any more."""
        self.inject: Callable[[bytes], None] = lambda data: None
        """Sends bytes from another thread, on the connection that carried the last record."""

    def record(self, record: Record) -> Iterator[bytes]:
        if self.struck:
            yield from self.after(record)
        elif self._due(record):
            self.struck = True
            yield from self.strike(record)
        else:
            yield record.raw

    def strike(self, record: Record) -> Iterator[bytes]:
        raise NotImplementedError

    def after(self, record: Record) -> Iterator[bytes]:
        yield record.raw

    def setup(self, data: bytes, passed: int) -> Iterator[bytes]:
        """Passes bytes of a link in set-up; `passed` bytes of this direction have gone before."""
        yield data

    def bells(self, data: bytes) -> Iterator[bytes]:
        """Passes shared memory's wake-ups, which have no content."""
        yield data

    def _due(self, record: Record) -> bool:
        if self.over or not self._counts(record) or record.fields["collective"] < self.fault.at:
            return False
        self._skip -= 1
        return self._skip < 0

    def _counts(self, record: Record) -> bool:
        """Tells whether this is a record of the traffic; others carry the ranks' states."""
        return record.is_data if self.fault.channel == "collectives" else record.kind in OF_MESSAGES

    def hit(self, record: Record | None, what: str, *, must_end: bool = True) -> None:
        described = ""
        if record is not None:
            name = Kind(record.kind).name.lower()
            described = (
                f" a {name} record of {len(record.raw)} bytes, number {record.fields['count']}, "
                f"{self.fault.channel[:-1]} {record.fields['collective']}"
            )
        self._history.hit(self.fault, what + described, must_end=must_end)

    def place(self, record: Record) -> int:
        return min(len(record.raw) - 1, int(self.fault.place * len(record.raw)))


class Flip(Strike):
    def strike(self, record: Record) -> Iterator[bytes]:
        at, bit = self.place(record), int(self.fault.amount * 8)
        self.hit(record, f"flipped bit {bit} of byte {at} of")
        changed = bytearray(record.raw)
        changed[at] ^= 1 << bit
        yield bytes(changed)


class Drop(Strike):
    def strike(self, record: Record) -> Iterator[bytes]:
        self.hit(record, "dropped")
        yield b""


class Replay(Strike):
    def strike(self, record: Record) -> Iterator[bytes]:
        self._copy = record
        self._later = int(self.fault.amount * 4)
        yield record.raw
        yield from self._due_again()

    def after(self, record: Record) -> Iterator[bytes]:
        yield record.raw
        if self._counts(record) and not self.over:
            self._later -= 1
            yield from self._due_again()

    def _due_again(self) -> Iterator[bytes]:
        if self._later == 0:
            self._later = -1
            self.hit(self._copy, "sent a second time")
            yield self._copy.raw


class Reorder(Strike):
    """Swaps two neighbouring records; that is allowed if they have different keys."""

    def __init__(self, fault: Fault, history: History) -> None:
        super().__init__(fault, history)
        self._lock = threading.Lock()
        self._held: Record | None = None

    def strike(self, record: Record) -> Iterator[bytes]:
        with self._lock:
            self._held, self._back = record, self.inject
        timer = threading.Timer(_LONGEST_HOLD_S, self._let_go)
        timer.daemon = True
        timer.start()
        yield b""

    def _let_go(self) -> None:
        with self._lock:
            held, self._held = self._held, None
            if held is not None:
                with suppress(OSError):  # its world has ended meanwhile
                    self._back(held.raw)

    def after(self, record: Record) -> Iterator[bytes]:
        with self._lock:
            held, self._held = self._held, None
        if held is None:
            yield record.raw
            return
        same = self._counts(record) and record.sequence == held.sequence
        self.hit(held, "sent after its successor:", must_end=same)
        yield record.raw
        yield held.raw


class Truncate(Strike):
    def strike(self, record: Record) -> Iterator[bytes]:
        at, gone = self.place(record), 1 + int(self.fault.amount * 64)
        self.hit(record, f"{gone} bytes from byte {at} taken out of")
        yield record.raw[:at] + record.raw[at + gone :]


class Cut(Strike):
    def strike(self, record: Record) -> Iterator[bytes]:
        at = self.place(record)
        self.hit(record, f"both ways cut after byte {at} of")
        yield Last(record.raw[:at])

    def after(self, record: Record) -> Iterator[bytes]:
        yield b""  # drops what had arrived here together with the last record

    def bells(self, data: bytes) -> Iterator[bytes]:
        self._skip -= 1
        if self.struck or self.over or self._skip >= 0:
            yield data
            return
        self.struck = True
        # What is in the memory still arrives; only a rank that sleeps on the socket notices.
        self.hit(None, "both ways cut", must_end=False)
        yield Last(b"")


class Silence(Strike):
    """From now on nothing arrives any more, not even the sender's end."""

    holds_open = True

    def strike(self, record: Record) -> Iterator[bytes]:
        self.hit(record, "nothing arrives any more, from")
        yield b""

    def after(self, record: Record) -> Iterator[bytes]:
        yield b""


class Mute(Strike):
    """Drops the alerts."""

    def record(self, record: Record) -> Iterator[bytes]:
        if record.kind is not Kind.ALERT:
            yield record.raw
        elif not self.struck:
            self.struck = True
            self.hit(record, "swallowed", must_end=False)


class Delay(Strike):
    def strike(self, record: Record) -> Iterator[bytes]:
        self.hit(record, f"delayed {_SLOW_RECORDS} records, first", must_end=False)
        self._left = _SLOW_RECORDS
        yield from self.after(record)

    def after(self, record: Record) -> Iterator[bytes]:
        self._left -= 1
        if self._left >= 0:
            time.sleep(self.fault.amount * 0.05)
        yield record.raw

    def bells(self, data: bytes) -> Iterator[bytes]:
        self._skip -= 1
        if not self.struck and not self.over and self._skip < 0:
            self.struck = True
            self.hit(None, "delayed a wake-up", must_end=False)
            time.sleep(self.fault.amount * 0.5)
        yield data


class Chop(Strike):
    """Delivers records in small pieces, as TCP may."""

    def strike(self, record: Record) -> Iterator[bytes]:
        self.hit(record, f"crumbled {_SLOW_RECORDS} records, first", must_end=False)
        self._left = _SLOW_RECORDS
        yield from self.after(record)

    def after(self, record: Record) -> Iterator[bytes]:
        self._left -= 1
        crumb = 1 + int(self.fault.amount * 150) if self._left >= 0 else len(record.raw)
        crumb = max(crumb, len(record.raw) // 300)
        for at in range(0, len(record.raw), crumb):
            yield record.raw[at : at + crumb]


class SetupStrike(Strike):
    """Strikes while a link is made, and lets all its records pass."""

    def record(self, record: Record) -> Iterator[bytes]:
        yield record.raw


class Interrupt(SetupStrike):
    """Cuts connections while a link is made on them, one after the other."""

    _cuts = 0

    def setup(self, data: bytes, passed: int) -> Iterator[bytes]:
        end = int(self.fault.place * _SETUP_BYTES)
        if self.over or self._cuts >= 1 + int(self.fault.amount * 3) or passed + len(data) <= end:
            yield data
            return
        self._cuts += 1
        # The end that has sent its last message believes that the link exists, and loses it.
        self.hit(None, f"cut a link in the making, after byte {end}", must_end=False)
        yield Last(data[: max(0, end - passed)])


class Hold(SetupStrike):
    """Delays what two ranks send to each other while they make a link."""

    def setup(self, data: bytes, passed: int) -> Iterator[bytes]:
        if not self.over and not self.struck:
            self.struck = True
            self.hit(None, "held up a link in the making", must_end=False)
        if not self.over:
            time.sleep(self.fault.amount * 0.4)
        yield data


STRIKES: Final[dict[FaultKind, type[Strike]]] = {
    FaultKind.INTERRUPT: Interrupt,
    FaultKind.HOLD: Hold,
    FaultKind.FLIP: Flip,
    FaultKind.DROP: Drop,
    FaultKind.REPLAY: Replay,
    FaultKind.REORDER: Reorder,
    FaultKind.TRUNCATE: Truncate,
    FaultKind.CUT: Cut,
    FaultKind.SILENCE: Silence,
    FaultKind.MUTE: Mute,
    FaultKind.DELAY: Delay,
    FaultKind.CHOP: Chop,
}


class Stream:
    """Finds the records in the bytes of one direction and passes them through the fault.

    Two ranks that dial each other at once have two connections for a moment, and so two streams.
    """

    def __init__(self, strike: Strike) -> None:
        self._strike = strike
        self.inject: Callable[[bytes], None] = lambda data: None
        """Sends bytes on this connection; the thread that carries the connection sets this."""
        self._splitter = Splitter()
        self._setup = b""
        self._passed = 0
        self._bells = False

    @property
    def holds_open(self) -> bool:
        return self._strike.holds_open and self._strike.struck

    def __call__(self, data: bytes) -> Iterator[bytes]:
        if self._bells:
            yield from self._strike.bells(data)
        elif self._splitter.rest:
            yield from self._records(data)
        else:
            data = self._setup + data
            setup = _tls_bytes(data)
            yield from self._strike.setup(data[:setup], self._passed)
            self._passed += setup
            rest, self._setup = data[setup:], b""
            if rest[:1] == b"S":
                yield from self._records(rest)
            elif rest and rest[0] not in _TLS_TYPES:
                self._bells = True
                yield from self._strike.bells(rest)
            else:
                self._setup = rest

    def _records(self, data: bytes) -> Iterator[bytes]:
        self._strike.inject = lambda data: self.inject(data)
        for record in self._splitter.feed(data):
            yield from self._strike.record(record)


def _tls_bytes(data: bytes) -> int:
    """Returns how many bytes at the start are whole TLS records."""
    at = 0
    while len(data) - at >= _TLS_HEADER_BYTES and data[at] in _TLS_TYPES:
        size = _TLS_HEADER_BYTES + int.from_bytes(data[at + 3 : at + 5], "big")
        if at + size > len(data):
            break
        at += size
    return at
