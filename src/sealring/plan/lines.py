"""Straight lines through measured points, none of whose parts can be negative."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Point(NamedTuple):
    x: float
    y: float
    weight: float


def lines(groups: Sequence[Sequence[Point]]) -> tuple[list[float], float]:
    """The start of each group's line and the slope that all have in common, by least squares.

    A group without points starts at 0.
    """
    starts = [0.0] * len(groups)
    free = {number for number, points in enumerate(groups) if points}
    while True:
        centres = {number: _centre(groups[number]) for number in free}
        along = across = 0.0
        for number, points in enumerate(groups):
            x0, y0 = centres.get(number, (0.0, 0.0))
            along += sum(weight * (x - x0) * (y - y0) for x, y, weight in points)
            across += sum(weight * (x - x0) ** 2 for x, _, weight in points)
        slope = max(0.0, along / across) if across else 0.0
        for number, (x0, y0) in centres.items():
            starts[number] = y0 - slope * x0
        below = {number for number in free if starts[number] < 0.0}
        if not below:
            return starts, slope
        free -= below
        for number in below:
            starts[number] = 0.0


def _centre(points: Sequence[Point]) -> tuple[float, float]:
    total = sum(point.weight for point in points)
    x = sum(point.weight * point.x for point in points) / total
    return x, sum(point.weight * point.y for point in points) / total
