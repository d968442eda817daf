"""Tables are fitted to made-up times whose answer is known."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from sealring.core.schedule import Algorithm, Operation, Topology
from sealring.core.schedule.table import Placement, Row, format_table, parse_table
from sealring.lab.bench.algorithms import Cell, busiest_rank_bytes, fit

KEY = (Operation.ALL_REDUCE, Placement.ONE)
WORK = {"direct": 300, "ring": 100, "tree": 200}
DIRECT, RING, TREE = Algorithm.DIRECT, Algorithm.RING, Algorithm.TREE


def cells(
    times: Mapping[int, Mapping[str, float]], ranks: int = 2, work: dict[str, int] = WORK
) -> list[Cell]:
    return [
        Cell("all_reduce", "one", ranks, size, algorithm, 2 * us, us, 0.01, work[algorithm], 3, 3)
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
    # Both sides differ equally, so the limit is half-way between them on a logarithmic scale.
    assert table.rows[KEY] == (Row(2, (8192,), (DIRECT, RING)),)


def test_the_nearer_one_gets_less_room() -> None:
    (row,) = fit(
        cells({1024: {"direct": 100, "ring": 140}, 65536: {"direct": 2000, "ring": 100}})
    ).rows[KEY]
    assert row.algorithms == (DIRECT, RING)
    assert 1024 <= row.up_to_bytes[0] < 2048


def test_what_is_longer_than_all_that_was_measured_goes_by_the_busiest_ranks_work() -> None:
    times = {1024: {"direct": 100, "ring": 200}, 4096: {"direct": 200, "ring": 400}}
    assert fit(cells(times)).rows[KEY] == (Row(2, (4096,), (DIRECT, RING)),)
    # If the work is equal, time decides.
    equal = {"direct": 100, "ring": 100}
    assert fit(cells(times, work=equal)).rows[KEY] == (Row(2, (), (DIRECT,)),)


def test_between_equals_the_busiest_ranks_work_decides() -> None:
    times = {1024: {"direct": 100, "ring": 104}, 65536: {"direct": 1000, "ring": 1040}}
    assert fit(cells(times)).rows[KEY] == (Row(2, (), (RING,)),)
    other_way_round = {"direct": 100, "ring": 300}
    assert fit(cells(times, work=other_way_round)).rows[KEY] == (Row(2, (), (DIRECT,)),)


def test_the_busiest_rank_by_the_programs() -> None:
    four = Topology((0,) * 4)
    whole = 4096
    # A ring: 3/4 sent and received, then its own quarter published and 3/4 more received.
    assert busiest_rank_bytes(Operation.ALL_REDUCE, RING, four, whole) == whole * 10 // 4
    # Direct: the whole tensor published, and three others' opened.
    assert busiest_rank_bytes(Operation.ALL_REDUCE, DIRECT, four, whole) == 4 * whole
    # A tree's root: two children's tensors opened, and the result published.
    assert busiest_rank_bytes(Operation.ALL_REDUCE, TREE, four, whole) == 3 * whole
    # A ring of parts: three sent on, three opened.
    assert busiest_rank_bytes(Operation.REDUCE_SCATTER, RING, four, whole) == 6 * whole


@pytest.mark.parametrize("noise", [1.0, 1.03])
def test_a_gain_within_the_noise_is_no_reason_to_change(noise: float) -> None:
    table = fit(
        cells({
            1024: {"direct": 50, "ring": 100},
            4096: {"direct": 60 * noise, "ring": 60},
            16384: {"direct": 100, "ring": 200},
        }, work={"direct": 1, "ring": 1})
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
    work = {"direct": 1, "ring": 1}
    small = cells({1024: {"direct": 1, "ring": 2}}, ranks=2, work=work)
    the_same = cells({1024: {"direct": 1, "ring": 3}}, ranks=4, work=work)
    large = cells({1024: {"direct": 2, "ring": 1}}, ranks=8, work=work)
    table = fit([*large, *the_same, *small])
    assert table.rows[KEY] == (Row(2, (), (DIRECT,)), Row(8, (), (RING,)))
    assert parse_table(format_table(table, {"by": "a test"}), "file") == table
