"""Agreements between ranks, with a member that lies about the other ranks' answers."""

from __future__ import annotations

import ctypes
from collections.abc import Generator
from typing import Any

import pytest

from sealring.core.engine.collective import Collective
from sealring.core.engine.rounds import first_objection, least
from sealring.core.schedule import Operation
from sealring.errors import GroupClosed
from tests.core.links.teams import SIZE, team
from tests.core.links.test_late import handshakes


def answered(agreement: Generator[Collective, None, Any], number: int) -> Generator[Any, None, Any]:
    """The agreement, continued after its introduction was answered with this number."""
    ((address, _),) = next(agreement).slots
    ctypes.c_uint32.from_address(address).value = number
    return agreement


def result_of(agreement: Generator[Any, None, Any]) -> Any:
    with pytest.raises(StopIteration) as ended:
        next(agreement)
    return ended.value.value


def test_a_number_that_was_left_out_ends_the_group() -> None:
    """A rank that accepted it would make more lanes than it may use threads."""
    assert result_of(answered(least(3), 2)) == 2
    assert result_of(answered(least(3), 3)) == 3
    with pytest.raises(GroupClosed, match="agreed on 64, and this one said 3: a rank between"):
        next(answered(least(3), 64))


def test_an_objection_that_was_left_out_ends_the_group() -> None:
    """A rank that accepted the answer would go on without the thing it failed to make."""
    agreement = answered(first_objection(3, range(4), "no memory"), 4)
    with pytest.raises(GroupClosed, match="left its number out"):
        next(agreement)


def test_a_reason_that_cannot_be_encoded_is_told() -> None:
    """A path that is not UTF-8 may be part of the reason, and the other ranks wait for it."""
    agreement = answered(first_objection(1, range(4), "cannot open /tmp/caf\udce9"), 1)
    assert next(agreement).operation is Operation.OBJECTION
    assert result_of(agreement) == "rank 1: cannot open /tmp/caf\\udce9"


def test_a_rank_says_that_an_objection_is_not_its_own() -> None:
    agreement = answered(first_objection(1, [5, 6, 7], ""), 1)
    assert next(agreement).root == 1
    told = "rank 6: this rank has no objection, another one claimed one in its name"
    assert result_of(agreement) == told


def test_an_objection_takes_no_link_that_the_group_has_not() -> None:
    """A rank that objects may be unable to make a link."""

    def agrees(rank: int, objection: str) -> str:
        agreement = first_objection(rank, range(SIZE), objection)
        try:
            while True:
                one.groups[rank]._run(next(agreement), 20.0)
        except StopIteration as ended:
            return str(ended.value)

    with team() as one:
        assert handshakes(one) == SIZE - 1
        for objects in range(SIZE):
            told = one.all(lambda rank, who=objects: agrees(rank, "full" if rank == who else ""))
            assert told == [f"rank {objects}: full"] * SIZE
        assert handshakes(one) == SIZE - 1
