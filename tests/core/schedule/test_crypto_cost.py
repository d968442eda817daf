"""Counts a ring's cryptography step by step: sealed once, then forwarded sealed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.core.schedule import ALGORITHMS, Action, Algorithm, Operation, Program, chunks
from tests.core.schedule.expectations import programs

SEALS = (Action.SEND, Action.PUBLISH)
OPENS = (Action.RECEIVE, Action.RECEIVE_REDUCE)


def sealed_and_opened(program: Program, slot_bytes: list[int]) -> int:
    return sum(slot_bytes[step.slot] for step in program.steps if step.action in SEALS + OPENS)


@given(st.integers(1, 24), st.integers(0, 10_000))
def test_a_ring_all_reduce_of_n_bytes_takes_at_most_3n(world, elements) -> None:
    slot_bytes = [length for _, length in chunks(elements, world, 4)]
    for program in programs(Operation.ALL_REDUCE, Algorithm.RING, world):
        assert sealed_and_opened(program, slot_bytes) <= 3 * 4 * elements


@pytest.mark.parametrize("world", range(5, 17))
def test_sealing_again_at_each_hop_would_take_more(world) -> None:
    slot_bytes = [64] * world
    for program in programs(Operation.ALL_REDUCE, Algorithm.RING, world):
        resealed = 64 * sum(step.action is Action.FORWARD for step in program.steps)
        cost = sealed_and_opened(program, slot_bytes)
        assert cost == 64 * (3 * world - 2)
        assert cost + resealed > 3 * 64 * world


@pytest.mark.parametrize(
    ("operation", "algorithm"),
    [(o, a) for o in (Operation.ALL_GATHER, Operation.BROADCAST) for a in ALGORITHMS[o]],
)
def test_what_is_only_copied_is_sealed_once_by_its_owner(operation, algorithm) -> None:
    built = programs(operation, algorithm, 7)
    seals = [sum(step.action in SEALS for step in program.steps) for program in built]
    owners = 7 if operation is Operation.ALL_GATHER else 1
    assert seals == [1] * owners + [0] * (7 - owners)
