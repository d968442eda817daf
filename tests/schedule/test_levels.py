"""In which exchange records go, and programs in which every record is for one peer."""

from __future__ import annotations

import pytest

from sealring.schedule import (
    REDUCING,
    Action,
    Algorithm,
    Operation,
    Program,
    Topology,
    check_programs,
    relayed,
)
from sealring.schedule.execution import RECEIVING, SENDING
from sealring.schedule.levels import Levels, levels_of
from tests.schedule.expectations import all_algorithms, programs

HOSTS = [(0, 1, 2, 3), (0, 0, 1, 1), (0, 1, 0, 2, 1)]


def built(
    operation: Operation, algorithm: Algorithm, hosts: tuple[int, ...], *, relays: bool
) -> list[Program]:
    flags = {"average": True, "premultiply": True} if operation in REDUCING else {}
    plain = programs(operation, algorithm, len(hosts), topology=Topology(hosts), **flags)
    return [relayed(each) for each in plain] if relays else plain


@pytest.mark.parametrize(("operation", "algorithm"), all_algorithms())
@pytest.mark.parametrize("hosts", HOSTS)
def test_relayed_programs_are_sound(
    operation: Operation, algorithm: Algorithm, hosts: tuple[int, ...]
) -> None:
    found = built(operation, algorithm, hosts, relays=True)
    check_programs(found)
    actions = {step.action for program in found for step in program.steps}
    assert actions.isdisjoint({Action.PUBLISH, Action.FORWARD})


def check_levels(found: list[Program], hosts: tuple[int, ...], levels: Levels) -> None:
    """Both ends of a message have its level, and a step comes after all that it waits for."""
    sent = {
        (rank, peer, rank if step.action is Action.PUBLISH else step.origin, step.message): level
        for rank, program in enumerate(found)
        for step, level in zip(program.steps, levels.of_steps[rank], strict=True)
        if step.action in SENDING
        for peer in step.peers
        if hosts[peer] != hosts[rank]
    }
    for rank, program in enumerate(found):
        own = levels.of_steps[rank]
        after = [0] * len(own)
        for index, step in enumerate(program.steps):
            after[index] = max((after[each] for each in step.after), default=0)
            exchanged = any(hosts[peer] != hosts[rank] for peer in step.peers)
            if not exchanged:
                assert own[index] == 0
                continue
            assert own[index] < levels.count
            if step.action in RECEIVING:
                assert own[index] == sent.pop((step.peers[0], rank, step.origin, step.message))
                after[index] = max(after[index], own[index] + 1)
            else:
                assert own[index] >= after[index]
    assert sent == {}


@pytest.mark.parametrize(("operation", "algorithm"), all_algorithms())
@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("relays", [False, True])
def test_both_ends_have_one_level(
    operation: Operation, algorithm: Algorithm, hosts: tuple[int, ...], relays: bool
) -> None:
    found = built(operation, algorithm, hosts, relays=relays)
    if not relays and len(set(hosts)) < len(hosts):
        found = built(operation, algorithm, hosts, relays=True)
    check_levels(found, hosts, levels_of(found, hosts))


def test_levels_of_an_all_reduce() -> None:
    """To the chunk's home and back: two; a ring has one for every hop."""
    apart = tuple(range(8))
    for algorithm, count in (
        (Algorithm.DIRECT, 1), (Algorithm.HIERARCHICAL, 2), (Algorithm.RING, 14)
    ):  # fmt: skip
        found = built(Operation.ALL_REDUCE, algorithm, apart, relays=False)
        assert levels_of(found, apart).count == count
    two_hosts = (0, 0, 0, 0, 1, 1, 1, 1)
    found = built(Operation.ALL_REDUCE, Algorithm.HIERARCHICAL, two_hosts, relays=True)
    levels = levels_of(found, two_hosts)
    assert (levels.count, levels.most_records) == (2, 2)


def test_a_byte_crosses_between_two_hosts_once_each_way() -> None:
    hosts = (0, 0, 0, 1, 1, 1)
    found = built(Operation.ALL_REDUCE, Algorithm.HIERARCHICAL, hosts, relays=True)
    crossing = [
        (step.slot, hosts[rank])
        for rank, program in enumerate(found)
        for step in program.steps
        if step.action is Action.SEND and hosts[step.peers[0]] != hosts[rank]
    ]
    assert sorted(crossing) == [(chunk, host) for chunk in range(6) for host in (0, 1)]
