"""What this process has seen under each name, so that an older value cannot come back unnoticed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from sealring.errors import ReplayedValue

REMEMBERED_NAMES: Final = 1 << 16
"""Beyond this the name that was used longest ago is forgotten: memory must not grow for ever."""

PartId = tuple[bytes, int]
"""A part's writer, and its number among the writer's parts. No two parts have the same."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of one name."""

    current: tuple[PartId, ...] = ()
    """The parts that the last read found."""
    gone: Mapping[bytes, int] = field(default_factory=dict)
    """By writer: its parts up to this number have been replaced or deleted."""


_NOTHING: Final = Seen()


class Freshness:
    """Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: OrderedDict[str, Seen] = OrderedDict()

    def seen(self, name: str) -> Seen:
        """Ask before reading: threads may finish their reads in another order than they began."""
        with self._lock:
            return self._seen.get(name, _NOTHING)

    def check(self, name: str, before: Seen, parts: Sequence[PartId]) -> None:
        """ReplayedValue if a part was gone, or a later one there, `before` this was read."""
        found = tuple(parts)
        gone = dict(before.gone)
        # A value only ever grows, or is replaced as a whole.
        if found[: len(before.current)] != before.current:
            _raise(gone, before.current)
        last = dict(gone)
        for writer, number in found:
            if number <= last.get(writer, 0):
                raise ReplayedValue(
                    "the store gave a value that had been replaced, cut or put into another order "
                    "since this process last saw it: somebody put it back"
                )
            last[writer] = number
        with self._lock:
            now = self._seen.get(name, _NOTHING)
            # If another thread has read meanwhile, it is unknown which value is the later one.
            current = found if now is before else now.current
            self._keep(name, now, current, gone.items())

    def replaced(self, name: str, writer: bytes, number: int) -> None:
        """What `writer` put there up to `number` is gone, as the writer itself knows."""
        with self._lock:
            now = self._seen.get(name, _NOTHING)
            self._keep(name, now, now.current, [(writer, number)])

    def _keep(
        self, name: str, now: Seen, current: tuple[PartId, ...], gone: Iterable[PartId]
    ) -> None:
        floor = dict(now.gone)
        _raise(floor, gone)
        self._seen[name] = Seen(current, floor)
        self._seen.move_to_end(name)
        if len(self._seen) > REMEMBERED_NAMES:
            self._seen.popitem(last=False)


def _raise(floor: dict[bytes, int], parts: Iterable[PartId]) -> None:
    for writer, number in parts:
        floor[writer] = max(number, floor.get(writer, 0))
