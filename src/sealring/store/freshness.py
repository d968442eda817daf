"""What this process has seen of each writer, so that an older value cannot come back unnoticed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

from sealring.errors import ReplayedValue
from sealring.store.values import Kind, Part

REMEMBERED_NAMES: Final = 1 << 16
"""Beyond this the name that was read longest ago is forgotten: memory must not grow for ever."""

Seen = Mapping[bytes, int]
"""By writer, the highest number of a part of its."""


class Freshness:
    """Of each name, what was seen there. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: OrderedDict[str, Seen] = OrderedDict()

    def seen(self, name: str) -> Seen:
        """Ask before reading: threads may finish their reads in another order than they began."""
        with self._lock:
            return self._seen.get(name, {})

    def check(self, parts: Sequence[Part], name: str, before: Seen) -> None:
        """ReplayedValue if a writer had put something later there `before` it was read."""
        latest: dict[bytes, int] = {}
        for part in parts:
            if part.number <= latest.get(part.writer, 0):
                raise ReplayedValue("the store holds a value whose parts are not in their order")
            latest[part.writer] = part.number
        for writer, number in latest.items():
            last = before.get(writer, 0)
            if number < last or (number == last and parts[0].kind is Kind.QUEUED):
                raise ReplayedValue(
                    "the store gave an older value than it had before under the same key: "
                    "somebody put it back"
                )
        self.note(name, latest)

    def note(self, name: str, latest: Seen) -> None:
        with self._lock:
            # A new mapping each time: whoever asked before keeps the one it got.
            merged = dict(self._seen.get(name, {}))
            for writer, number in latest.items():
                merged[writer] = max(number, merged.get(writer, 0))
            self._seen[name] = merged
            self._seen.move_to_end(name)
            if len(self._seen) > REMEMBERED_NAMES:
                self._seen.popitem(last=False)
