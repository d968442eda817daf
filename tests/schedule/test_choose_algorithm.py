from __future__ import annotations

import pytest

from sealring.errors import ConfigurationError
from sealring.schedule import Algorithm, Operation, choose
from sealring.schedule.choose import ALGORITHM_VARIABLE


@pytest.fixture(autouse=True)
def no_override(monkeypatch):
    monkeypatch.delenv(ALGORITHM_VARIABLE, raising=False)


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
def test_the_environment_overrides_the_table(algorithm, monkeypatch):
    monkeypatch.setenv(ALGORITHM_VARIABLE, algorithm.name.lower())
    for operation in set(Operation) - {Operation.BARRIER}:
        assert choose(operation, 4, 1) is choose(operation, 4, 1 << 30) is algorithm


def test_a_barrier_is_always_direct(monkeypatch):
    monkeypatch.setenv(ALGORITHM_VARIABLE, "ring")
    assert choose(Operation.BARRIER, 4, 0) is Algorithm.DIRECT


@pytest.mark.parametrize("operation", [Operation.ALL_REDUCE, Operation.BARRIER])
def test_an_unknown_algorithm_is_refused(operation, monkeypatch):
    monkeypatch.setenv(ALGORITHM_VARIABLE, "tree")
    with pytest.raises(ConfigurationError) as refused:
        choose(operation, 4, 0)
    assert str(refused.value) == (
        "SEALRING_ALGORITHM is 'tree'; set it to ring or direct, or unset it"
    )
