"""The plan of a change of layout: every element once, from a rank that has it, and no more."""

from __future__ import annotations

import random

import pytest

from sealring.errors import ForeignPart, MissingPart
from sealring.vault.movement import LARGEST_ENTRIES, Box, Layout, Part, check_layout, entry, plan


def part(box: Box, dtype: str | None = "float32", item: int = 4) -> Part:
    return Part(dtype, item, [12, 10], box)


def rows(ranks: int) -> list[Layout]:
    return [{"w": part(Box([12 // ranks * one, 0], [12 // ranks, 10]))} for one in range(ranks)]


def columns(ranks: int) -> list[Layout]:
    return [{"w": part(Box([0, 10 // ranks * one], [12, 10 // ranks]))} for one in range(ranks)]


def whole(ranks: int) -> list[Layout]:
    return [{"w": part(Box([0, 0], [12, 10]))} for _ in range(ranks)]


def cells(box: Box) -> list[tuple[int, int]]:
    (a, b), (x, y) = box.offsets, box.sizes
    return [(row, column) for row in range(a, a + x) for column in range(b, b + y)]


@pytest.mark.parametrize("old", [rows(4), rows(2), columns(2), whole(3), whole(1)])
@pytest.mark.parametrize("new", [rows(3), rows(4), columns(5), whole(2)])
def test_every_element_comes_once_from_a_rank_that_has_it(
    old: list[Layout], new: list[Layout]
) -> None:
    world = max(len(old), len(new))
    held = [*old, *([{}] * (world - len(old)))]
    wanted = [*new, *([{}] * (world - len(new)))]
    moves = plan(held, wanted)
    for rank, layout in enumerate(wanted):
        got = [cell for move in moves if move.target == rank for cell in cells(move.box)]
        assert sorted(got) == (cells(layout["w"].box) if layout else [])
        own = set(cells(held[rank]["w"].box)) if held[rank] else set()
        received = {c for m in moves if m.target == rank != m.source for c in cells(m.box)}
        assert not own & received
    for move in moves:
        assert set(cells(move.box)) <= set(cells(held[move.source]["w"].box))


def test_what_all_hold_comes_from_different_ranks() -> None:
    everything: Layout = {str(number): part(Box([0, 0], [12, 10])) for number in range(6)}
    moves = plan([everything] * 3 + [{}], [{}, {}, {}, everything])
    assert sorted(move.source for move in moves) == [0, 0, 1, 1, 2, 2]


def test_boxes_without_others_leave_no_overlap() -> None:
    made = random.Random(3)
    outer = Box([1, 2], [9, 7])
    for _ in range(200):
        a, b = made.randrange(1, 9), made.randrange(2, 8)
        inner = Box([a, b], [made.randrange(1, 11 - a), made.randrange(1, 10 - b)])
        rest = [cell for box in outer.without(inner) for cell in cells(box)]
        assert sorted(rest + cells(inner)) == sorted(cells(outer))


def test_elements_that_no_rank_holds() -> None:
    with pytest.raises(MissingPart, match="no rank holds 60 elements of 'w' that rank 1 wants"):
        plan([rows(2)[0], {}], [{}, whole(1)[0]])


def test_another_type_or_shape() -> None:
    for changed in ({"dtype": "float64"}, {"item": 1}):
        other = {"w": part(Box([0, 0], [12, 10]), **changed)}
        with pytest.raises(ForeignPart, match="types and shapes do not"):
            plan([whole(1)[0]], [other])


@pytest.mark.parametrize("box", [Box([0, 5], [12, 6]), Box([13, 0], [0, 0]), Box([0], [12])])
def test_a_rank_that_claims_elements_out_of_a_tensor(box: Box) -> None:
    with pytest.raises(ForeignPart, match="rank 7"):
        check_layout(7, {"w": part(box)})


@pytest.mark.parametrize(
    "made",
    [
        Part(None, 1, [10], Box([5], [5])),
        Part(None, 1000, [10], Box([0], [10])),
        Part(None, 1, [2, 5], Box([0, 0], [2, 5])),
        Part(None, 1, [LARGEST_ENTRIES + 1], Box([0], [LARGEST_ENTRIES + 1])),
    ],
)
def test_a_rank_that_claims_an_entry_that_cannot_be(made: Part) -> None:
    check_layout(7, {"step": entry(0), "w": entry(100)})
    with pytest.raises(ForeignPart, match="rank 7"):
        check_layout(7, {"step": made})


def test_a_number_without_dimensions() -> None:
    one = {"step": Part("int64", 8, [], Box([], []))}
    moves = plan([one, {}], [{}, one])
    assert [(move.source, move.target, move.bytes) for move in moves] == [(0, 1, 8)]
