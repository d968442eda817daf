"""In which exchange records travel, and programs in which each record is for one peer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from sealring.core.schedule import (
    CALLED,
    REDUCING,
    ROOTED,
    Action,
    Algorithm,
    Operation,
    Program,
    Topology,
    check_programs,
    relayed,
)
from sealring.core.schedule.execution import RECEIVING, SENDING, Execution
from sealring.core.schedule.levels import levels_for
from tests.core.schedule.expectations import all_algorithms, programs

CALLS = [each for each in all_algorithms() if each[0] in CALLED]
"""The operations that GPUs may run; other operations of a group run on CPUs."""
HOSTS = [(0, 1, 2, 3), (0, 0, 1, 1), (0, 1, 0, 2, 1), (0, 0, 0, 0)]


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


@dataclass(frozen=True, slots=True)
class OfAll:
    """The levels of the programs of all ranks."""

    of_steps: list[tuple[int, ...]]
    count: int
    most_records: int
    most_lent: int


def by_running(programs: list[Program], hosts: tuple[int, ...]) -> OfAll:
    """Computes the levels by running all programs."""
    levels = [[0] * len(program.steps) for program in programs]
    complete = [[0] * len(program.steps) for program in programs]
    sent: dict[tuple[int, int, int, int], tuple[int, int]] = {}
    """The step that sends, and its level."""
    sending, receiving, lending = ([0] * len(programs) for _ in range(3))
    count = 1
    for rank, _, index in Execution(programs).turns():
        step = programs[rank].steps[index]
        level = max((complete[rank][earlier] for earlier in step.after), default=0)
        complete[rank][index] = level
        exchanged = any(hosts[peer] != hosts[rank] for peer in step.peers)
        if step.action in SENDING:
            origin = rank if step.action is Action.PUBLISH else step.origin
            for peer in step.peers:
                sent[rank, peer, origin, step.message] = index, level
            sending[rank] += exchanged
            lending[rank] += not exchanged
        elif step.action in RECEIVING:
            before, sender = level, step.peers[0]
            at, level = sent[sender, rank, step.origin, step.message]
            if exchanged and before - 1 > level:
                # What was opened before came later, so this record must not come earlier.
                level = levels[sender][at] = before - 1
                assert programs[sender].steps[at].peers == (rank,)
            complete[rank][index] = max(complete[rank][index], level + exchanged)
            receiving[rank] += exchanged
        if exchanged:
            levels[rank][index] = level
            count = max(count, level + 1)
    most = max(1, *sending, *receiving)
    return OfAll([tuple(each) for each in levels], count, most, max(0, *lending))


def told(
    operation: Operation, algorithm: Algorithm, hosts: tuple[int, ...], *, apart: tuple[int, ...]
) -> Iterator[tuple[OfAll, OfAll]]:
    """Yields the levels as the ranks compute them and as a run shows them, for all variants."""
    relays = 1 < len(set(hosts)) < len(hosts)
    topology = Topology(hosts)
    for root in range(len(hosts)) if operation in ROOTED else [0]:
        for flags in ({}, {"average": True, "premultiply": True}):
            if flags and operation not in REDUCING:
                continue
            found = programs(
                operation, algorithm, len(hosts), root=root, topology=topology, **flags
            )
            if relays:
                found = [relayed(each) for each in found]
            by_rank = [
                levels_for(
                    operation, algorithm, apart, rank,
                    root=root, topology=topology, relays=relays, **flags,
                )
                for rank in range(len(hosts))
            ]  # fmt: skip
            same = {(each.count, each.most_records, each.most_lent) for each in by_rank}
            assert len(same) == 1
            yield OfAll([each.of_steps for each in by_rank], *same.pop()), by_running(found, apart)


@pytest.mark.parametrize(("operation", "algorithm"), CALLS)
@pytest.mark.parametrize("hosts", HOSTS)
def test_the_path_of_a_chunk_tells_what_all_programs_do(
    operation: Operation, algorithm: Algorithm, hosts: tuple[int, ...]
) -> None:
    """Covers GPUs that share a host or not, and groups where all ranks exchange with all others."""
    everybody = tuple(range(len(hosts)))
    for apart in {hosts, everybody} if len(set(hosts)) > 1 else {everybody}:
        for as_told, as_it_is in told(operation, algorithm, hosts, apart=apart):
            assert as_told == as_it_is


@pytest.mark.parametrize(("operation", "algorithm"), CALLS)
def test_and_so_in_any_arrangement(operation: Operation, algorithm: Algorithm) -> None:
    chosen = random.Random(f"{operation} {algorithm}")
    for _ in range(4):
        world = chosen.randint(2, 12)
        hosts = tuple(chosen.randrange(chosen.randint(1, world)) for _ in range(world))
        apart = hosts if len(set(hosts)) > 1 else tuple(range(world))
        for as_told, as_it_is in told(operation, algorithm, hosts, apart=apart):
            assert as_told == as_it_is, hosts


def test_levels_of_an_all_reduce() -> None:
    """A chunk goes to its home and back in two levels; a ring has one level for each hop."""
    apart = tuple(range(8))
    for algorithm, count in (
        (Algorithm.DIRECT, 1), (Algorithm.HIERARCHICAL, 2), (Algorithm.RING, 14)
    ):  # fmt: skip
        levels = levels_for(Operation.ALL_REDUCE, algorithm, apart, 3, topology=Topology(apart))
        assert levels.count == count
    hosts = (0, 0, 0, 0, 1, 1, 1, 1)
    levels = levels_for(
        Operation.ALL_REDUCE, Algorithm.HIERARCHICAL, hosts, 3,
        topology=Topology(hosts), relays=True,
    )  # fmt: skip
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
