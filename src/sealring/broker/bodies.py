"""The memory that requests take until they are answered, over all connections together.

When they would take more than the limit, an unfinished request of the source that holds the most
of it ends, its oldest one first. So a flood of half-sent requests ends its own, and workers of
other addresses are served meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from sealring.errors import TooManyRequests
from sealring.formats.bounded_connections import source_of


class Body:
    """One request's bytes, as they come."""

    def __init__(self, bodies: Bodies, address: str, drop: Callable[[], None]) -> None:
        self._bodies, self.address, self.drop = bodies, address, drop
        self.source = source_of(address)
        self.content = bytearray()
        self.finished = False
        self.dropped = False

    def add(self, data: bytes) -> None:
        self.content += data
        self._bodies.grown(self, len(data))
        if self.dropped:
            raise TooManyRequests("unfinished requests took too much memory: come again later")

    def finish(self) -> bytes:
        """The whole of it. Its memory counts until `close`."""
        self.finished = True
        return bytes(self.content)

    def close(self) -> None:
        self._bodies.close(self)


class Bodies:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: dict[Body, int] = {}
        """How many bytes each holds, in the order in which they began."""
        self._held: Counter[str] = Counter()

    def open(self, address: str, drop: Callable[[], None]) -> Body:
        """`drop` ends the connection, if its bytes must go."""
        body = Body(self, address, drop)
        self._open[body] = 0
        return body

    def grown(self, body: Body, more: int) -> None:
        if body not in self._open:
            return
        self._open[body] += more
        self._held[body.source] += more
        while self._held.total() > self._limit:
            unfinished = [each for each, held in self._open.items() if held and not each.finished]
            if not unfinished:
                return
            # The first of those whose source holds the most: max() keeps the order.
            victim = max(unfinished, key=lambda each: self._held[each.source])
            victim.dropped = True
            self.close(victim)
            victim.drop()

    def close(self, body: Body) -> None:
        held = self._open.pop(body, None)
        if held is None:
            return
        body.content = bytearray()
        self._held[body.source] -= held
        if not self._held[body.source]:
            del self._held[body.source]
