from __future__ import annotations

import pytest

from sealring.schedule import ALGORITHMS, Algorithm, Operation, choose


@pytest.mark.parametrize(
    ("operation", "world", "largest_direct"),
    [
        (Operation.ALL_REDUCE, 2, 32 << 10),
        (Operation.ALL_REDUCE, 16, 32 << 10),
        (Operation.ALL_REDUCE, 64, 8 << 10),
        (Operation.REDUCE_SCATTER, 8, 64 << 10),
        (Operation.ALL_GATHER, 8, 64 << 10),
        (Operation.BROADCAST, 8, 32 << 10),
    ],
)
def test_small_messages_go_directly(operation, world, largest_direct):
    assert choose(operation, world, 0) is Algorithm.DIRECT
    assert choose(operation, world, largest_direct) is Algorithm.DIRECT
    assert choose(operation, world, largest_direct + 1) is Algorithm.RING


@pytest.mark.parametrize("algorithm", Algorithm)
def test_an_override_comes_before_the_table(algorithm):
    for operation in Operation:
        for size in (1, 1 << 30):
            chosen = choose(operation, 4, size, algorithm)
            if algorithm in ALGORITHMS[operation]:
                assert chosen is algorithm
            else:
                assert chosen is choose(operation, 4, size)


def test_a_barrier_is_always_direct():
    assert choose(Operation.BARRIER, 4, 0, Algorithm.RING) is Algorithm.DIRECT
