"""check_programs accepts all programs that are built, and names what is wrong in broken ones."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealring.core.schedule import (
    ALGORITHMS,
    CALLED,
    REDUCING,
    ROOTED,
    Action,
    Algorithm,
    Operation,
    Program,
    Step,
    Topology,
    check_programs,
    input_slots,
    program_for,
)
from sealring.core.schedule.execution import Execution
from sealring.errors import ConfigurationError, Unsupported
from tests.codes import coded
from tests.core.schedule.expectations import all_algorithms, programs


@pytest.mark.parametrize(("operation", "algorithm"), all_algorithms())
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8, 9, 16])
def test_everything_we_build_is_sound(operation, algorithm, world) -> None:
    flags = (False, True) if operation in REDUCING else (False,)
    for root in range(world if operation in ROOTED else 1):
        for average in flags:
            for premultiply in flags:
                built = programs(
                    operation,
                    algorithm,
                    world,
                    root=root,
                    average=average,
                    premultiply=premultiply,
                )
                check_programs(built, read_only=_inputs(operation, world, root))


def _inputs(operation, world, root):
    return lambda rank: input_slots(operation, world, is_root=rank == root)


@pytest.mark.parametrize(("operation", "algorithm"), all_algorithms())
@given(
    world=st.integers(2, 9),
    premultiply=st.booleans(),
    window=st.integers(1, 8),
    link_records=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=40, deadline=None)
def test_no_deadlock_however_little_room_links_have(
    operation, algorithm, world, premultiply, window, link_records, seed
) -> None:
    built = programs(operation, algorithm, world, premultiply=premultiply and operation in REDUCING)
    segments = 1 if operation is Operation.BARRIER else 9
    execution = Execution(
        built,
        segments=[[segments] * len(each.steps) for each in built],
        window=window,
        link_records=link_records,
        shuffle=random.Random(seed),
    )
    turns = list(execution.turns())
    assert len(set(turns)) == len(turns) == segments * sum(len(each.steps) for each in built)


@given(
    hosts=st.lists(st.integers(0, 3), min_size=2, max_size=9),
    operation=st.sampled_from([o for o in Operation if Algorithm.HIERARCHICAL in ALGORITHMS[o]]),
    scaled=st.booleans(),
    window=st.integers(1, 5),
    link_records=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
@settings(max_examples=120, deadline=None)
def test_hierarchies_of_any_shape_are_sound(
    hosts, operation, scaled, window, link_records, seed, data
) -> None:
    world = len(hosts)
    root = data.draw(st.integers(0, world - 1)) if operation in ROOTED else 0
    scaled = scaled and operation in REDUCING
    built = programs(
        operation,
        Algorithm.HIERARCHICAL,
        world,
        root=root,
        average=scaled,
        premultiply=scaled,
        topology=Topology(tuple(hosts)),
    )
    check_programs(built, read_only=_inputs(operation, world, root))
    execution = Execution(
        built,
        segments=[[5] * len(each.steps) for each in built],
        window=window,
        link_records=link_records,
        shuffle=random.Random(seed),
    )
    assert sum(1 for _ in execution.turns()) == 5 * sum(len(each.steps) for each in built)


@pytest.mark.parametrize("operation", [Operation.ALL_REDUCE, Operation.ALL_GATHER])
def test_in_a_hierarchy_every_chunk_enters_a_host_once(operation) -> None:
    hosts = (0, 1, 0, 2, 1, 0, 1)
    built = programs(operation, Algorithm.HIERARCHICAL, 7, topology=Topology(hosts))
    for host in set(hosts):
        entered = [
            step.message
            for program in built
            if hosts[program.rank] == host
            for step in program.steps
            if step.origin >= 0 and step.action is Action.RECEIVE and hosts[step.peers[0]] != host
        ]
        assert sorted(entered) == [rank for rank in range(7) if hosts[rank] != host]


def steps_before(program: Program, index: int) -> set[Action]:
    """Returns the actions that a step waits for, directly or indirectly."""
    found: set[int] = set()
    to_visit = list(program.steps[index].after)
    while to_visit:
        earlier = to_visit.pop()
        found.add(earlier)
        to_visit.extend(set(program.steps[earlier].after) - found)
    return {program.steps[earlier].action for earlier in found}


@pytest.mark.parametrize("operation", CALLED)
@pytest.mark.parametrize("premultiply", [False, True])
def test_in_direct_programs_a_slow_peer_delays_no_other_rank(operation, premultiply) -> None:
    """Shows why direct programs never deadlock; the test above tries only some orders.

    Rank 0 of an all-reduce may reduce into what it publishes, because all other ranks take it
    unconditionally.
    """
    premultiply = premultiply and operation in REDUCING
    for program in programs(operation, Algorithm.DIRECT, 6, premultiply=premultiply):
        if operation is Operation.ALL_REDUCE and program.rank == 0:
            continue
        for index, step in enumerate(program.steps):
            if step.peers:
                assert not steps_before(program, index) & {Action.SEND, Action.PUBLISH}


@pytest.mark.parametrize("operation", [Operation.ALL_REDUCE, Operation.ALL_GATHER])
def test_a_world_of_one_sends_nothing(operation) -> None:
    for algorithm in ALGORITHMS[operation]:
        [program] = programs(operation, algorithm, 1)
        assert not any(step.peers for step in program.steps)


def refusal(built: list[Program], **options: object) -> str:
    with pytest.raises(ConfigurationError, check=coded("configuration.schedule_error")) as refused:
        check_programs(built, **options)  # type: ignore[arg-type]
    return str(refused.value)


def broken(built: list[Program], rank: int, index: int, **changes: object) -> list[Program]:
    """Returns the programs with some fields of one step changed."""
    steps = list(built[rank].steps)
    steps[index] = replace(steps[index], **changes)  # type: ignore[arg-type]
    return with_steps(built, rank, steps)


def with_steps(built: list[Program], rank: int, steps: list[Step]) -> list[Program]:
    changed = list(built)
    changed[rank] = replace(built[rank], steps=tuple(steps))
    return changed


def find(program: Program, action: Action) -> int:
    return next(i for i, step in enumerate(program.steps) if step.action is action)


@pytest.fixture
def ring() -> list[Program]:
    """A ring all-reduce of three. Rank 0: SEND 2, reduce 1, SEND 1, reduce 0, PUBLISH 0 ..."""
    return programs(Operation.ALL_REDUCE, Algorithm.RING, 3)


@pytest.fixture
def chain() -> list[Program]:
    """A ring broadcast of four: 0 publishes, 1 and 2 receive and forward, 3 receives."""
    return programs(Operation.BROADCAST, Algorithm.RING, 4)


def test_dropped_send() -> None:
    gather = programs(Operation.ALL_GATHER, Algorithm.DIRECT, 3)
    publish, *rest = gather[2].steps
    shorter = replace(publish, peers=(0,))
    assert refusal(with_steps(gather, 2, [shorter, *rest])) == (
        "rank 1, step 2 (RECEIVE) waits for message 2 published by rank 2 from rank 2, "
        "which is never sent"
    )


def test_dropped_receive(chain) -> None:
    assert refusal(with_steps(chain, 3, [])) == (
        "rank 2, step 1 (FORWARD) sends message 0 published by rank 0 from rank 2, "
        "which rank 3 never receives"
    )


def test_doubled_message(ring) -> None:
    assert refusal(broken(ring, 0, 2, message=2)) == (
        "rank 0, step 2 (SEND) seals message 2 again after step 0"
    )


def test_record_taken_twice(chain) -> None:
    [receive] = chain[3].steps
    assert refusal(with_steps(chain, 3, [receive, replace(receive, after=(0,))])) == (
        "rank 3, step 1 (RECEIVE) takes the record that step 0 has taken"
    )


def test_forward_of_something_not_received(ring) -> None:
    forward = find(ring[0], Action.FORWARD)
    publish = find(ring[0], Action.PUBLISH)
    assert refusal(broken(ring, 0, forward, source=publish, after=(publish,))) == (
        f"rank 0, step {forward} (FORWARD) passes on step {publish}, which receives nothing"
    )


def test_forward_before_it_is_received(chain) -> None:
    assert refusal(broken(chain, 1, 1, after=())) == (
        "rank 1, step 1 (FORWARD) does not wait for step 0, whose record it passes on"
    )


def test_forward_of_a_record_of_the_pair(ring) -> None:
    forward = find(ring[0], Action.FORWARD)
    received = find(ring[0], Action.RECEIVE_REDUCE)
    assert refusal(broken(ring, 0, forward, source=received, after=(received,))) == (
        f"rank 0, step {forward} (FORWARD) passes on a record of the pair, "
        "which no other rank can open"
    )


def test_forward_under_another_name(chain) -> None:
    assert refusal(broken(chain, 1, 1, message=7)) == (
        "rank 1, step 1 (FORWARD) calls its record message 7 of rank 0, "
        "but step 0 receives message 0 of rank 0"
    )


def test_published_record_that_comes_home(chain) -> None:
    assert refusal(broken(chain, 2, 1, peers=(3, 0))) == (
        "rank 2, step 1 (FORWARD) brings message 0 back to rank 0, who published it"
    )


def test_published_record_that_comes_twice(chain) -> None:
    assert refusal(broken(chain, 0, 0, peers=(1, 3))) == (
        "rank 2, step 1 (FORWARD) brings message 0 of rank 0 to rank 3, who has it from rank 0"
    )


def test_published_record_that_does_not_reach_everyone() -> None:
    programs = [program_for(Operation.BROADCAST, Algorithm.DIRECT, 3, rank) for rank in range(3)]
    programs[0] = replace(programs[0], steps=(replace(programs[0].steps[0], peers=(1,)),))
    programs[2] = replace(programs[2], steps=())
    assert refusal(programs) == (
        "rank 0, step 0 (PUBLISH) publishes message 0, which never reaches rank 2"
    )


def test_wrong_peer(ring) -> None:
    assert refusal(broken(ring, 1, 1, peers=(2,))) == (
        "rank 1, step 1 (RECEIVE_REDUCE) waits for message 2 from rank 2, which is never sent"
    )


def test_wait_for_a_later_step(ring) -> None:
    assert refusal(broken(ring, 0, 0, after=(1,))) == (
        "rank 0, step 0 (SEND) waits for step 1, which is not an earlier one"
    )


def test_race_for_a_slot(ring) -> None:
    assert refusal(broken(ring, 0, 2, after=())) == (
        "rank 0, step 2 (SEND) races with step 1 for slot 1"
    )


def test_write_to_an_input() -> None:
    scatter = programs(Operation.REDUCE_SCATTER, Algorithm.RING, 2)
    copy = find(scatter[0], Action.COPY)
    assert (
        refusal(
            broken(scatter, 0, copy, slot=1, source=0),
            read_only=lambda rank: input_slots(Operation.REDUCE_SCATTER, 2),
        )
        == f"rank 0, step {copy} (COPY) writes slot 1, which is read-only"
    )


def test_scratch_read_before_it_is_written() -> None:
    program = Program(
        Operation.BROADCAST, Algorithm.DIRECT, 0, 1, 1, (0,), (Step(Action.COPY, 0, source=1),)
    )
    assert refusal([program]) == (
        "rank 0, step 0 (COPY) reads scratch slot 1 before anything is there"
    )


def test_slot_that_is_not_there(chain) -> None:
    assert refusal(broken(chain, 3, 0, slot=1)) == "rank 3, step 0 (RECEIVE) uses slot 1 of 1"


def test_peer_outside_the_world(chain) -> None:
    assert refusal(broken(chain, 3, 0, peers=(4,))) == (
        "rank 3, step 0 (RECEIVE) names rank 4 as its peer"
    )


def test_programs_out_of_order(chain) -> None:
    assert refusal(chain[::-1]) == "program 0 of 4 is for rank 3 of 4"


def test_programs_of_two_algorithms(chain) -> None:
    mixed = [*chain[:3], program_for(Operation.BROADCAST, Algorithm.DIRECT, 4, 3)]
    assert refusal(mixed) == "rank 3 runs BROADCAST DIRECT, rank 0 BROADCAST RING"


def test_cyclic_wait() -> None:
    def waits_first(rank: int) -> Program:
        peer = 1 - rank
        steps = (
            Step(Action.RECEIVE, 0, (peer,), message=peer),
            Step(Action.SEND, 1, (peer,), message=rank, after=(0,)),
        )
        return Program(Operation.ALL_GATHER, Algorithm.DIRECT, rank, 2, 2, (), steps)

    assert refusal([waits_first(0), waits_first(1)]) == (
        "deadlock: "
        "rank 0 waits in step 0 for message 1 from rank 1, but nothing is on the link; "
        "rank 1 waits in step 0 for message 0 from rank 0, but nothing is on the link"
    )


def test_wait_behind_the_head_of_a_link() -> None:
    sender = Program(
        Operation.ALL_GATHER,
        Algorithm.DIRECT,
        0,
        2,
        2,
        (),
        (Step(Action.SEND, 0, (1,), message=0), Step(Action.SEND, 1, (1,), message=1, after=(0,))),
    )
    receiver = replace(
        sender,
        rank=1,
        steps=(
            Step(Action.RECEIVE, 1, (0,), message=1),
            Step(Action.RECEIVE, 0, (0,), message=0, after=(0,)),
        ),
    )
    assert refusal([sender, receiver]) == (
        "deadlock: rank 1 waits in step 0 for message 1 from rank 0, "
        "but message 0 from rank 0 is in front"
    )


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((Operation.BARRIER, Algorithm.RING, 2, 0), {}, "BARRIER has no RING algorithm"),
        ((Operation.BROADCAST, Algorithm.RING, 2, 2), {}, "rank 2 is not in a world of 2"),
        (
            (Operation.BROADCAST, Algorithm.RING, 2, 0),
            {"root": 2},
            "root 2 is not in a world of 2",
        ),
        ((Operation.ALL_GATHER, Algorithm.RING, 2, 0), {"root": 1}, "ALL_GATHER has no root"),
        (
            (Operation.BROADCAST, Algorithm.RING, 2, 0),
            {"average": True},
            "BROADCAST reduces nothing, so it can neither average nor scale",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(arguments, options, text) -> None:
    with pytest.raises(Unsupported) as refused:
        program_for(*arguments, **options)
    assert str(refused.value) == text
