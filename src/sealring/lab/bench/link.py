"""`python -m sealring.lab link`: what a message and what a byte cost, between two ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from sealring.core.schedule import Algorithm, Operation, choose
from sealring.lab.bench.collectives import Effort, Exchange, measure
from sealring.lab.bench.harness import Progress
from sealring.lab.results import Fit, LinkCase, LinkPoint

if TYPE_CHECKING:
    from sealring.lab.results import Transport, Variant

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

    def within(part: float) -> None:  # a hop is one case: its sizes are parts of it
        if progress is not None:
            progress((len(points) + part) / len(sizes))

    for exchange in measure("collectives", plan, 2, transport, variants, effort, within):
        points.append(exchange)
        if len(points) == len(sizes):
            yield Hop("link", exchange.collective, transport, tuple(points))
            points.clear()


# ---- the line T = alpha * messages + bytes / beta
#
# Least squares of the relative error, so that microseconds count as much as milliseconds; neither
# cost can be negative. The confidence comes from drawing the samples again (bootstrap).


DRAWS: Final = 400
WORST_RESIDUAL: Final = 0.5
"""Points that lie further from every line than this are not described by one."""


def fit(points: Sequence[LinkPoint]) -> Fit | None:
    """None for fewer than three points, and where they do not lie on a line."""
    if len(points) < 3:
        return None
    costs = np.array(
        [[point.messages, point.messages * point.bytes] for point in points], dtype=float
    )
    times = np.array([median(point.seconds) for point in points], np.float64)
    alpha, per_byte = _solve(costs, times)
    residual = float(np.median(np.abs(costs @ [alpha, per_byte] - times) / times))
    if per_byte <= 0 or residual > WORST_RESIDUAL:
        return None
    generator = np.random.default_rng(0)
    solved = [_solve(costs, _redrawn(points, generator)) for _ in range(DRAWS)]
    drawn = np.array(solved, np.float64)
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    return Fit(
        alpha_s=float(alpha),
        alpha_low_s=float(min(low[0], alpha)),
        alpha_high_s=float(max(high[0], alpha)),
        beta_bytes_per_s=float(1 / per_byte),
        beta_low_bytes_per_s=float(1 / max(high[1], per_byte)),
        beta_high_bytes_per_s=float(1 / min(low[1], per_byte)) if low[1] > 0 else 1 / per_byte,
        residual=residual,
    )


def predicted(line: Fit, messages: int, message_bytes: int) -> float:
    """Seconds for so many messages one after the other, by the line."""
    return messages * (line.alpha_s + message_bytes / line.beta_bytes_per_s)


def line_words(line: Fit | None) -> tuple[str, str, str]:
    """Alpha in µs, beta in GB/s, each with its interval, and how far off the points are."""
    if line is None:
        return "no line fits", "-", "-"
    alphas = line.alpha_s, line.alpha_low_s, line.alpha_high_s
    betas = line.beta_bytes_per_s, line.beta_low_bytes_per_s, line.beta_high_bytes_per_s
    alpha, *about_alpha = (f"{one * 1e6:,.1f}" for one in alphas)
    beta, *about_beta = (f"{one / 1e9:.2f}" for one in betas)
    return (
        f"{alpha} ({' to '.join(about_alpha)})",
        f"{beta} ({' to '.join(about_beta)})",
        f"{line.residual:.0%}",
    )


def _redrawn(points: Sequence[LinkPoint], generator: np.random.Generator) -> NDArray[np.float64]:
    return np.array(
        [np.median(generator.choice(point.seconds, len(point.seconds))) for point in points],
        np.float64,
    )


def _solve(costs: NDArray[np.float64], times: NDArray[np.float64]) -> tuple[float, float]:
    scaled = costs / times[:, None]
    ones = np.ones(len(times), np.float64)
    alpha, per_byte = np.linalg.lstsq(scaled, ones, rcond=None)[0]
    if alpha < 0 or per_byte < 0:
        # The best point with one of them at its bound: two unknowns leave only these.
        column = scaled[:, 1] if alpha < 0 else scaled[:, 0]
        only = float(column @ ones / (column @ column))
        return (0.0, only) if alpha < 0 else (only, 0.0)
    return float(alpha), float(per_byte)
