"""Counts the requests that were refused before anything was proven, and keeps the last of them.

Anybody who reaches the broker can be refused any number of times. So these refusals do not go into
the audit log, which only grows. They are held here, bounded, and added now and then to one row of
the store.

refused/<broker>     {"since", "counts": {error: number},
                      "last": [{"time", "address", "error", "why"}]}
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict, deque
from typing import Any, Final

from sealring.attest.broker.store import Row, StoreView
from sealring.errors import BrokerRefusal, SealringError, named

_LOG = logging.getLogger("sealring.attest.broker")
PREFIX: Final = "refused/"
LAST: Final = 64
_MAX_TEXT: Final = 300
_NONCES: Final = 1 << 16
_LINES_A_MINUTE: Final = 10


class Strangers:
    def __init__(self, broker: str, now: float) -> None:
        """`broker` is this broker's name among those that share the store."""
        self._key = PREFIX + broker
        self._started = now
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._last: deque[Row] = deque(maxlen=LAST)
        self._nonces: OrderedDict[bytes, None] = OrderedDict()
        self._minute, self._lines = 0, 0

    def note(self, error: SealringError, address: str, now: float) -> None:
        name, why = named(error), str(error)[:_MAX_TEXT]
        with self._lock:
            self._counts[name] += 1
            entry = {"time": round(now, 3), "address": address, "error": name, "why": why}
            self._last.append(entry)
            if self._minute != int(now // 60):
                self._minute, self._lines = int(now // 60), 0
            self._lines += 1
            lines = self._lines
        if lines <= _LINES_A_MINUTE:
            _LOG.warning("refused %s: %s: %s", address, name, why)
        if lines == _LINES_A_MINUTE:
            _LOG.warning("further refusals of this minute are counted, and not written here")

    def use_nonce(self, nonce: bytes) -> None:
        """Notes that evidence failed for this nonce: this broker takes no more evidence for it."""
        with self._lock:
            self._nonces[nonce] = None
            if len(self._nonces) > _NONCES:
                self._nonces.popitem(last=False)

    def require_unused(self, nonce: bytes) -> None:
        with self._lock:
            used = nonce in self._nonces
        if used:
            raise BrokerRefusal(
                "evidence was brought for this nonce before: ask for another one",
                code="broker.reused_nonce",
            )

    def flush(self) -> Flush | None:
        """Takes out what must be added to the store's row. None if there is nothing new."""
        with self._lock:
            if not self._counts:
                return None
            found = Flush(self._key, self._started, self._counts, list(self._last))
            self._counts = Counter()
            self._last.clear()
            return found

    def put_back(self, flush: Flush) -> None:
        """Called if the store did not take the flush."""
        with self._lock:
            self._counts += flush.counts
            self._last.extendleft(reversed(flush.last[: LAST - len(self._last)]))


class Flush:
    def __init__(self, key: str, since: float, counts: Counter[str], last: list[Row]) -> None:
        self._key, self._since = key, since
        self.counts, self.last = counts, last

    def write(self, view: StoreView) -> None:
        before = view.get(self._key) or {"since": self._since, "counts": {}, "last": []}
        counts = Counter(before["counts"]) + self.counts
        last = [*before["last"], *self.last][-LAST:]
        view.put(self._key, {"since": before["since"], "counts": dict(counts), "last": last})


def refused(view: StoreView) -> dict[str, Any]:
    """The counts and the last refusals of all brokers of this store."""
    counts: Counter[str] = Counter()
    last: list[Row] = []
    since: float | None = None
    for _, row in view.scan(PREFIX):
        counts += Counter(row["counts"])
        last += row["last"]
        since = row["since"] if since is None else min(since, row["since"])
    last = sorted(last, key=lambda entry: entry["time"])[-LAST:]
    return {"since": since, "counts": dict(counts), "last": last}
