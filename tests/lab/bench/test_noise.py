"""Pairs of samples tell a difference from noise, whatever the distribution."""

from __future__ import annotations

import random
from math import comb

import pytest

from sealring.lab.bench.harness import CONFIDENCE, compare, compare_apart, interval


@pytest.mark.parametrize("count", [6, 7, 11, 15, 21, 50])
def test_the_interval_holds_the_median_as_often_as_promised(count: int) -> None:
    low, high = interval(count)
    assert low == count - 1 - high
    missed = 2 * sum(comb(count, below) for below in range(low + 1)) / 2**count
    assert missed <= 1 - CONFIDENCE
    tighter = 2 * sum(comb(count, below) for below in range(low + 2)) / 2**count
    assert tighter > 1 - CONFIDENCE, "no narrower one does"


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_few_samples_give_all_they_have(count: int) -> None:
    assert interval(count) == (0, count - 1)


def test_a_clear_difference_has_a_ratio() -> None:
    told = compare([2.0, 2.1, 1.9, 2.05, 2.0, 1.95], [1.0] * 6)
    assert not told.only_noise
    assert told.told == told.ratio == pytest.approx(2.0)
    assert str(told) == "2.000 (1.90 to 2.10)"


def test_a_wide_interval_around_one_is_only_noise_and_says_by_how_much() -> None:
    told = compare([0.8, 1.3, 0.9, 1.2, 1.0, 1.1], [1.0] * 6)
    assert told.only_noise
    assert told.told is None
    assert str(told) == "only noise (±24%)"


def test_a_narrow_interval_around_one_is_a_finding() -> None:
    told = compare([1.01, 0.99, 1.0, 1.02, 0.98, 1.0], [1.0] * 6)
    assert not told.only_noise
    assert told.told == pytest.approx(1.0)


def test_what_both_suffer_from_cancels() -> None:
    slow = [1, 1, 5, 1, 9, 1, 1, 3]
    told = compare([1.1 * each for each in slow], [1.0 * each for each in slow])
    assert told.low == pytest.approx(1.1) == told.high


def test_samples_of_two_runs_are_compared_without_pairs() -> None:
    draw = random.Random(0)
    one = [draw.uniform(0.95, 1.05) for _ in range(15)]
    told = compare_apart([2 * each for each in one], one[::-1] + one[:3])
    assert told.low < 2 < told.high
    assert told.noise < 0.06
    assert compare_apart(one, one).low <= 1 <= compare_apart(one, one).high
