"""The fit finds the alpha and beta from which the times were made."""

from __future__ import annotations

import random

import pytest

from sealring.lab.bench.collectives import fit, predicted
from sealring.lab.results import LinkPoint

SIZES = (4096, 65536, 1 << 20, 25 << 20)


def points(alpha: float, beta: float, scatter: float = 0.02, messages: int = 2) -> list[LinkPoint]:
    draw = random.Random(1)
    return [
        LinkPoint(
            size,
            messages,
            [
                messages * (alpha + size / beta) * draw.uniform(1 - scatter, 1 + scatter)
                for _ in range(15)
            ],
        )
        for size in SIZES
    ]


@pytest.mark.parametrize(("alpha", "beta"), [(4e-5, 0.8e9), (1e-3, 1.5e9), (2e-6, 4e11)])
@pytest.mark.parametrize("messages", [1, 2])
def test_both_are_found_and_lie_in_their_intervals(
    alpha: float, beta: float, messages: int
) -> None:
    line = fit(points(alpha, beta, messages=messages))
    assert line is not None
    assert line.alpha_s == pytest.approx(alpha, rel=0.05)
    assert line.beta_bytes_per_s == pytest.approx(beta, rel=0.05)
    assert line.alpha_low_s <= line.alpha_s <= line.alpha_high_s
    assert line.beta_low_bytes_per_s <= line.beta_bytes_per_s <= line.beta_high_bytes_per_s
    assert line.alpha_high_s - line.alpha_low_s < 0.2 * alpha
    assert line.residual < 0.03
    assert predicted(line, messages, SIZES[0]) == pytest.approx(
        messages * (alpha + SIZES[0] / beta), rel=0.05
    )


def test_no_cost_is_negative() -> None:
    line = fit(points(0.0, 1e9, scatter=0.2))
    assert line is not None
    assert line.alpha_s >= 0 <= line.alpha_low_s


def test_two_points_make_no_line() -> None:
    assert fit(points(1e-5, 1e9)[:2]) is None


def test_times_that_do_not_grow_with_the_bytes_make_no_line() -> None:
    flat = [LinkPoint(size, 1, [1.0 / (index + 1)]) for index, size in enumerate(SIZES)]
    assert fit(flat) is None
