"""Fits lines through points, without a negative start or slope."""

from __future__ import annotations

import pytest

from sealring.lab.plan.fit import Point, lines


def on(start: float, slope: float, *xs: float) -> list[Point]:
    return [Point(x, start + slope * x, 1.0 + x) for x in xs]


def test_groups_have_one_slope_and_starts_of_their_own() -> None:
    starts, slope = lines([on(3.0, 2.0, 1, 2, 4), on(7.0, 2.0, 8, 16), []])
    assert starts == pytest.approx([3.0, 7.0, 0.0])
    assert slope == pytest.approx(2.0)


def test_a_line_that_falls_is_level() -> None:
    starts, slope = lines([[Point(1, 4, 1), Point(2, 2, 1)]])
    assert (starts, slope) == ([3.0], 0.0)


def test_a_start_below_nothing_is_nothing_and_the_slope_fits_the_rest() -> None:
    starts, slope = lines([[Point(1, 0, 1), Point(2, 3, 1)], on(10.0, 2.0, 5)])
    assert starts == pytest.approx([0.0, 10.0 + 2.0 * 5 - 5 * slope])
    assert slope == pytest.approx((1 * 0 + 2 * 3) / (1 + 4))


def test_one_point_alone_starts_at_its_height() -> None:
    assert lines([[Point(5, 8, 1)]]) == ([8.0], 0.0)
