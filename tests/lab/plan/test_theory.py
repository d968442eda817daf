"""Rounds, traffic and fan-in from the textbooks agree with counts of the actual programs."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from sealring.core.schedule import Algorithm, Topology
from tests.lab.plan.theory import shape_of

WORLDS = (2, 3, 4, 8, 16)


@pytest.mark.parametrize("world", WORLDS)
def test_a_ring(world: int) -> None:
    shape = shape_of(Algorithm.RING, world)
    assert shape.rounds == 2 * (world - 1)
    assert shape.sent == shape.received == Fraction(2 * (world - 1), world)
    assert shape.fan_in == 1
    assert shape.peak == Fraction(1, world)


@pytest.mark.parametrize("world", WORLDS)
def test_a_parameter_server_with_its_shards_on_all_ranks(world: int) -> None:
    shape = shape_of(Algorithm.PARAMETER_SERVER, world)
    assert shape.rounds == 2
    assert shape.sent == shape.received == Fraction(2 * (world - 1), world)
    assert shape.fan_in == world - 1
    assert shape.peak == Fraction(world - 1, world)


@pytest.mark.parametrize("world", WORLDS)
def test_the_decentralised_exchange_with_everybody(world: int) -> None:
    shape = shape_of(Algorithm.DIRECT, world)
    assert shape.rounds == 1
    assert shape.sent == shape.received == world - 1
    assert shape.fan_in == world - 1
    assert shape.peak == world - 1


@pytest.mark.parametrize("world", WORLDS)
def test_a_tree(world: int) -> None:
    shape = shape_of(Algorithm.TREE, world)
    levels = math.ceil(math.log2(world))
    assert shape.rounds <= 2 * levels
    assert shape.fan_in == levels if world & (world - 1) == 0 else shape.fan_in <= levels
    assert shape.received <= levels + 1


def test_between_hosts_a_hierarchy_takes_four_rounds() -> None:
    topology = Topology((0, 0, 1, 1, 2, 2))
    shape = shape_of(Algorithm.HIERARCHICAL, 6, topology)
    assert shape.rounds == 4
    assert shape.fan_in < 5
