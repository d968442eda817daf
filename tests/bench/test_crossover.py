"""From times to a table: made-up times whose answer is known."""

from __future__ import annotations

import pytest

from sealring.bench.crossover import Cell, fit
from sealring.schedule import Algorithm, Operation
from sealring.schedule.table import Placement, Row, format_table, parse_table

KEY = (Operation.ALL_REDUCE, Placement.ONE)
DIRECT, RING, TREE = Algorithm.DIRECT, Algorithm.RING, Algorithm.TREE


def cells(times: dict[int, dict[str, float]], ranks: int = 2) -> list[Cell]:
    return [
        Cell("all_reduce", "one", ranks, size, algorithm, us, 0.01, 3, 3)
        for size, by_algorithm in times.items()
        for algorithm, us in by_algorithm.items()
    ]


def test_the_fastest_wins_and_they_cross_in_between() -> None:
    table = fit(
        cells({
            1024: {"direct": 50, "ring": 100},
            4096: {"direct": 60, "ring": 120},
            16384: {"direct": 240, "ring": 120},
            65536: {"direct": 900, "ring": 300},
        })
    )  # fmt: skip
    # Equally far apart on both sides: half-way between the two, on a logarithmic scale.
    assert table.rows[KEY] == (Row(2, (8192,), (DIRECT, RING)),)


def test_whoever_is_nearer_gets_less_room() -> None:
    (row,) = fit(
        cells({1024: {"direct": 100, "ring": 107}, 65536: {"direct": 200, "ring": 100}})
    ).rows[KEY]
    assert row.algorithms == (DIRECT, RING)
    assert 1024 <= row.up_to_bytes[0] < 2048


@pytest.mark.parametrize("noise", [1.0, 1.03])
def test_a_gain_within_the_noise_is_no_reason_to_change(noise: float) -> None:
    table = fit(
        cells({
            1024: {"direct": 50, "ring": 100},
            4096: {"direct": 60 * noise, "ring": 60},
            16384: {"direct": 100, "ring": 200},
        })
    )  # fmt: skip
    assert table.rows[KEY] == (Row(2, (), (DIRECT,)),)


def test_an_algorithm_between_two_others() -> None:
    (row,) = fit(
        cells({
            1024: {"direct": 10, "tree": 20, "ring": 90},
            4096: {"direct": 40, "tree": 20, "ring": 90},
            16384: {"direct": 160, "tree": 80, "ring": 90},
            65536: {"direct": 640, "tree": 320, "ring": 100},
        })
    ).rows[KEY]  # fmt: skip
    assert row.algorithms == (DIRECT, TREE, RING)
    assert 1024 <= row.up_to_bytes[0] < 4096 <= row.up_to_bytes[1] <= 65536


def test_a_row_for_each_world_and_the_file_holds_them_all() -> None:
    small = cells({1024: {"direct": 1, "ring": 2}}, ranks=2)
    large = cells({1024: {"direct": 2, "ring": 1}}, ranks=8)
    table = fit([*large, *small])
    assert table.rows[KEY] == (Row(2, (), (DIRECT,)), Row(8, (), (RING,)))
    assert parse_table(format_table(table, {"by": "a test"}), "file") == table
