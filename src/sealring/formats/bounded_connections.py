"""Bounds the number of connections that anybody can open, and chooses which one is closed.

The number is bounded in all and per source. If there is no room, the connection is closed ("gives
way") that has kept us waiting longest. A worker answers within milliseconds, so it is seldom that
one.
"""

from __future__ import annotations

import functools
import ipaddress
from collections import Counter
from collections.abc import Iterator
from typing import Final, Generic, Protocol, TypeVar

LEAST_SECONDS: Final = 0.05
"""No connection gives way before its peer has had this much time to answer."""


class BoundedConnection(Protocol):
    waiting_since: float | None
    """The time since when we wait for the peer. None while the connection is being served."""

    @property
    def source(self) -> str:
        """The name of its source: see `source_of`."""


T = TypeVar("T", bound=BoundedConnection)


class BoundedConnections(Generic[T]):
    """The open connections. Not thread-safe."""

    def __init__(self, most: int, most_of_one_source: int | None = None) -> None:
        """By default, one source may have half of all connections."""
        self.limit_to(most, most_of_one_source)
        self._per_source: Counter[str] = Counter()
        self._all: set[T] = set()
        # Dicts keep the order of insertion, which is nearly that of waiting_since.
        self._waiting: dict[str, dict[T, None]] = {}

    def limit_to(self, most: int, most_of_one_source: int | None = None) -> None:
        self._most = max(2, most)
        self._most_of_one_source = max(1, most_of_one_source or self._most // 2)

    def too_many(self) -> list[T]:
        """The connections that must give way after the limit was lowered."""
        excess = len(self._all) - self._most
        if excess <= 0:
            return []
        waiting = [one for one in self._all if one.waiting_since is not None]
        return sorted(waiting, key=lambda one: one.waiting_since or 0.0)[:excess]

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[T]:
        return iter(tuple(self._all))

    def __contains__(self, one: T) -> bool:
        return one in self._all

    def add(self, one: T, waiting_since: float) -> None:
        self._all.add(one)
        self._per_source[one.source] += 1
        self.wait_for(one, waiting_since)

    def remove(self, one: T) -> None:
        self.serve(one)
        self._all.remove(one)
        self._per_source[one.source] -= 1
        if not self._per_source[one.source]:
            del self._per_source[one.source]

    def wait_for(self, one: T, since: float) -> None:
        """Now it is the peer's turn."""
        self.serve(one)
        one.waiting_since = since
        self._waiting.setdefault(one.source, {})[one] = None

    def serve(self, one: T) -> None:
        """Now it is our turn: the connection cannot give way until `wait_for`."""
        if one.waiting_since is None:
            return
        one.waiting_since = None
        waiting = self._waiting[one.source]
        del waiting[one]
        if not waiting:
            del self._waiting[one.source]

    def has_room(self, source: str) -> bool:
        """Whether there is room for one more connection of this source."""
        return len(self._all) < self._most and self._per_source[source] < self._most_of_one_source

    def to_give_way(self, source: str, now: float) -> T | None:
        """The connection that gives way to a newcomer from `source`. None if all are too new.

        It is one of the same source if that has its full share, else one of the source that has
        most. It is never one of a source that has fewer than `source`, so a flood from some
        addresses does not displace workers at others. A source whose connections are all too new is
        skipped, or it would keep newcomers out for all others.
        """
        count = self._per_source.__getitem__
        if count(source) >= self._most_of_one_source:
            sources = [source]
        else:
            sources = sorted(self._waiting, key=count, reverse=True)
        for each in sources:
            if count(each) < count(source):
                break
            oldest = next(iter(self._waiting.get(each, ())), None)
            if oldest is None or oldest.waiting_since is None:
                continue
            if now >= oldest.waiting_since + LEAST_SECONDS:
                return oldest
        return None


@functools.lru_cache
def source_of(host: str) -> str:
    """An IPv4 address, or the /64 network of an IPv6 address: one host may have all of it."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.version == 4:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))
