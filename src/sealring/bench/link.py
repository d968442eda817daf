"""`sealring bench link`: what a message costs and what a byte costs, between two ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, cast

from sealring.bench.exchange import Effort, Exchange, Progress, measure
from sealring.bench.fit import fit
from sealring.results import LinkCase, LinkPoint
from sealring.schedule import Algorithm, Operation, choose

if TYPE_CHECKING:
    from sealring.results.schema import Transport, Variant

OPERATIONS: Final = ("all_reduce", "ping_pong")
SIZES: Final = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 25 << 20)


@dataclass(frozen=True, slots=True)
class Hop:
    """One operation over one transport, by size, as all variants did it."""

    section: Literal["link"]
    operation: str
    transport: str
    exchanges: tuple[Exchange, ...]

    @property
    def label(self) -> str:
        return f"{self.operation} over {self.transport}"

    def cases(self, run: int) -> list[LinkCase]:
        variants = self.exchanges[0].samples
        return [self._case(variant, run) for variant in variants]

    def _case(self, variant: str, run: int) -> LinkCase:
        points = [_point(exchange, variant) for exchange in self.exchanges]
        return LinkCase(
            operation=cast("Literal['ping_pong', 'all_reduce']", self.operation),
            transport=cast("Transport", self.transport if variant == "sealed" else "tcp"),
            variant=cast("Variant", variant),
            device="cpu",
            run=run,
            points=points,
            fit=fit(points),
        )


def _point(exchange: Exchange, variant: str) -> LinkPoint:
    seconds = list(exchange.samples[variant].seconds)
    if exchange.collective == "ping_pong":
        return LinkPoint(exchange.bytes, 1, [each / 2 for each in seconds])
    # A small tensor goes whole, in one exchange; a larger one in halves, there and back again.
    chosen = choose(Operation.ALL_REDUCE, exchange.ranks, exchange.bytes)
    if variant == "sealed" and chosen is Algorithm.DIRECT:
        return LinkPoint(exchange.bytes, 1, seconds)
    return LinkPoint(exchange.bytes // 2, 2, seconds)


def measure_link(
    transport: str,
    operations: Sequence[str],
    sizes: Sequence[int],
    variants: Sequence[str],
    effort: Effort,
    progress: Progress | None = None,
) -> Iterator[Hop]:
    plan = [(operation, size) for operation in operations for size in sizes]
    points: list[Exchange] = []
    for exchange in measure(plan, 2, transport, variants, effort, _within(points, sizes, progress)):
        points.append(exchange)
        if len(points) == len(sizes):
            yield Hop("link", exchange.collective, transport, tuple(points))
            points.clear()


def _within(
    points: list[Exchange], sizes: Sequence[int], progress: Progress | None
) -> Progress | None:
    """A hop is one case: its sizes are parts of it."""
    if progress is None:
        return None
    return lambda part: progress((len(points) + part) / len(sizes))
