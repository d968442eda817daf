"""How far two checkpoints are from each other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sealring.vault.checkpoint_difference import difference_of_states

NAN, INF = math.nan, math.inf
CASES: dict[str, tuple[Any, Any, float]] = {
    "equal": ([1.0, -4.0], [1.0, -4.0], 0.0),
    "of the largest number": ([1.0, -4.0], [1.5, -4.0], 0.125),
    "of very small ones": ([1e-30, 4e-30], [2e-30, 4e-30], 0.25),
    "nothing to measure by": ([0.0, 0.0], [0.0, 1e-30], INF),
    "the same NaN and infinity": ([NAN, INF, 1.0], [NAN, INF, 1.0], 0.0),
    "a NaN": ([NAN, 1.0], [2.0, 1.0], INF),
    "another infinity": ([INF, 1.0], [-INF, 1.0], INF),
    "one more element": ([1.0], [1.0, 1.0], INF),
    "nothing": ([], [], 0.0),
}


@pytest.mark.parametrize("name", CASES)
def test_of_tensors(name: str) -> None:
    one, other, size = CASES[name]
    found = difference_of_states({"a": {"b": torch.tensor(one)}}, {"a": {"b": torch.tensor(other)}})
    assert found.size == pytest.approx(size)
    assert found.where == ("a.b" if size else "")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([1]), torch.tensor([2])),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (torch.tensor([True]), torch.tensor([False])),
        (3, 4),
        (3, 3.0),
        ("a", "b"),
        ([1, 2], [1]),
        (torch.tensor([1.0]), 1.0),
        ({}, []),
    ],
)
def test_what_has_no_measure_must_be_equal(one: Any, other: Any) -> None:
    assert difference_of_states({"x": one}, {"x": other}).size == INF
    assert difference_of_states({"x": one}, {"x": one}).size == 0.0
    assert difference_of_states({"x": one}, {}).size == INF


def test_numbers_beside_tensors_and_complex_ones() -> None:
    assert difference_of_states({"lr": 2.0}, {"lr": 1.0}).size == 0.5
    one, other = torch.tensor([3 + 4j]), torch.tensor([3 + 5j])
    assert difference_of_states({"x": one}, {"x": other}).size == pytest.approx(0.2)
