"""Large collectives that several threads of each rank share."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sealring import limits
from sealring.core.group.settings import read_settings
from sealring.core.links.exchange import Exchange
from sealring.core.settings import usable_cores, with_settings
from sealring.errors import ConfigurationError, GroupClosed, OutOfStep, PeerUnreachable, Unsupported
from sealring.record.recording.noted import traffic_so_far
from tests.core.group.test_dropped import make, open_after_a_group, returns_to, what_is_open
from tests.workers import Workers

pytestmark = pytest.mark.skipif(usable_cores() < 2, reason="a second thread needs a second core")

LARGE = (5 << 20) // 4 + 3
"""Elements: more than one lane has segments of it in a world of up to 3."""


def group() -> Any:
    return dist.group.WORLD


def every_large_collective(rank: int, world: int) -> int:
    numbers = torch.arange(LARGE, dtype=torch.float32) % 251
    for _ in range(2):
        tensor = numbers * (rank + 1)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, numbers * sum(range(1, world + 1)))
    small = torch.ones(5)
    dist.all_reduce(small)
    assert small.tolist() == [world] * 5
    for root in range(world):
        tensor = numbers + root if rank == root else torch.zeros(LARGE)
        dist.broadcast(tensor, root)
        assert torch.equal(tensor, numbers + root)
        tensor = numbers * (rank + 1)
        dist.reduce(tensor, root)
        if rank == root:
            assert torch.equal(tensor, numbers * sum(range(1, world + 1)))
        gathered = [torch.empty(LARGE) for _ in range(world)] if rank == root else None
        dist.gather(numbers + rank, gathered, root)
        for other, each in enumerate(gathered or []):
            assert torch.equal(each, numbers + other)
        part = torch.empty(LARGE)
        parts = [numbers * (other + 2) for other in range(world)] if rank == root else None
        dist.scatter(part, parts, root)
        assert torch.equal(part, numbers * (rank + 2))
    # Each rank sends every other rank a different length.
    lengths = [LARGE // (1 + (rank + other) % 2) for other in range(world)]
    received = [torch.empty(length) for length in lengths]
    dist.all_to_all(received, [numbers[:length] + rank for length in lengths])
    for other, each in enumerate(received):
        assert torch.equal(each, numbers[: lengths[other]] + other)
    account = group().account()
    assert account["sealed_records"] > 0
    assert account["run_s"] >= account["seal_s"] + account["open_s"]
    return int(group().threads)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("world", [2, 3])
def test_results_are_those_of_one_thread(workers: Workers, world: int, transport: str) -> None:
    env = {"SEALRING_TRANSPORT": transport, **with_settings({}, threads=2)}
    assert workers.run(every_large_collective, world=world, env=env) == [2] * world


def linked_when_needed(rank: int, world: int, what: Callable[[int, int], Any]) -> Any:
    """Links and their lanes are made when they are first needed, as in a large group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "MOST_LINKED_AT_ONCE", 1)
        dist.init_process_group("sealring")
    try:
        return what(rank, world)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("algorithm", ["", "ring", "hierarchical"])
def test_groups_that_make_their_links_later(
    workers: Workers, algorithm: str, transport: str
) -> None:
    env = {"SEALRING_TRANSPORT": transport}
    same: dict[str, Any] = {"threads": 2, **({"algorithm": algorithm} if algorithm else {})}
    hosts = {rank: with_settings({}, host=f"host-{rank // 2}", **same) for rank in range(4)}
    threads = workers.run(
        linked_when_needed, every_large_collective, world=4, env=env, rank_env=hosts, group=False
    )
    assert threads == [2] * 4


def accounts_of_links(rank: int, world: int) -> list[Any]:
    every_large_collective(rank, world)
    return [(link.peer, link.sent, link.received) for link in group().engine.commitments()]


def test_both_ends_of_a_pair_have_the_same_account_of_all_lanes(workers: Workers) -> None:
    """The account covers all lanes: lane 0 alone has only about half of the records."""
    env = {"SEALRING_TRANSPORT": "shm", **with_settings({}, threads=2)}
    accounts = workers.run(accounts_of_links, world=3, env=env)
    for rank, account in enumerate(accounts):
        for peer, sent, received in account:
            back = {other: (s, r) for other, s, r in accounts[peer]}[rank]
            assert (sent, received) == (back[1], back[0])
            assert sent is not None
    records = {
        rank: sum(sent[0] for _, sent, _ in account) for rank, account in enumerate(accounts)
    }
    one_thread = workers.run(
        accounts_of_links, world=3, env={**env, **with_settings({}, threads=1)}
    )
    for rank, account in enumerate(one_thread):
        # The lanes' agreement is by introductions, which count too.
        assert records[rank] >= sum(sent[0] for _, sent, _ in account) > 0


def test_both_ends_have_the_same_account_in_groups_that_make_their_links_later(
    workers: Workers,
) -> None:
    env = with_settings({}, threads=2, algorithm="ring")
    accounts = workers.run(linked_when_needed, accounts_of_links, world=4, env=env, group=False)
    for rank, account in enumerate(accounts):
        for peer, sent, received in account:
            back = {other: (s, r) for other, s, r in accounts[peer]}[rank]
            assert (sent, received) == (back[1], back[0])


def counted(rank: int, world: int) -> dict[str, int]:
    dist.all_reduce(torch.ones(LARGE))
    dist.all_reduce(torch.eye(3).to_sparse())
    dist.barrier()
    dist.new_group([0, 1])
    traffic = traffic_so_far()
    epochs = {each.epoch for each in traffic.groups if each.state == "open"}
    return {each.kind: each.count for each in traffic.collectives if each.epoch in epochs}


def test_calls_are_counted_and_not_what_they_are_made_of(workers: Workers) -> None:
    """Introductions precede the first large one, and a sparse one is several all_gathers."""
    env = {**with_settings({}, threads=2), "SEALRING_JOB": "counted"}
    counts = workers.run(counted, world=2, env=env)
    assert counts == [{"all_reduce": 2, "barrier": 1}] * 2


def agrees(rank: int, world: int) -> int:
    tensor = torch.ones(LARGE)
    dist.all_reduce(tensor)
    assert tensor.eq(world).all()
    return int(group().threads)


def test_the_rank_with_fewest_threads_decides(workers: Workers) -> None:
    rank_env = {0: with_settings({}, threads=2), 1: with_settings({}, threads=1)}
    assert workers.run(agrees, world=2, rank_env=rank_env) == [1, 1]


def cannot_make_lanes(rank: int, world: int) -> int:
    def fails(*_: Any) -> None:
        raise Unsupported("no further pipe today")

    works = Exchange.open_agreed
    if rank == 1:
        Exchange.open_agreed = fails  # type: ignore[assignment]
    try:
        return agrees(rank, world)
    finally:
        Exchange.open_agreed = works  # type: ignore[method-assign]


@pytest.mark.threat("N5")
def test_without_further_pipes_one_thread_does_all(workers: Workers) -> None:
    env = {**with_settings({}, threads=2), "SEALRING_TRANSPORT": "auto"}
    assert workers.run(cannot_make_lanes, world=2, env=env) == [1, 1]


def hears_why_not(rank: int, world: int) -> list[str]:
    """The log's lines about a member whose reason is meant for a terminal."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("sealring")
    log.addHandler(handler)

    def fails(*_: Any) -> None:
        raise Unsupported("no pipe\x1b]0;owned\x07\nsealring: rank 0 says so")

    works = Exchange.open_agreed
    if rank == 1:
        Exchange.open_agreed = fails  # type: ignore[assignment]
    try:
        assert agrees(rank, world) == 1
    finally:
        Exchange.open_agreed = works  # type: ignore[method-assign]
        log.removeHandler(handler)
    return [line for line in lines if "one thread" in line]


@pytest.mark.threat("W12")
def test_a_members_reason_is_one_line_without_terminal_codes(workers: Workers) -> None:
    line = (
        "sealring: a large collective uses one thread: "
        "rank 1: no pipe?]0;owned?; sealring: rank 0 says so"
    )
    env = {**with_settings({}, threads=2), "SEALRING_JOB": "reason"}
    assert workers.run(hears_why_not, world=2, env=env) == [[line]] * 2
    assert (
        workers.run(linked_when_needed, hears_why_not, world=4, env=env, group=False)
        == [[line]] * 4
    )


def pipes_never_come(rank: int, world: int) -> int:
    def leads_nowhere(*_: Any) -> None:
        raise PeerUnreachable("no pipe today")

    dist.init_process_group("sealring", timeout=timedelta(seconds=3))
    works = Exchange.set_up
    if rank == 1:
        Exchange.set_up = leads_nowhere  # type: ignore[assignment]
    try:
        return agrees(rank, world)
    finally:
        Exchange.set_up = works  # type: ignore[method-assign]
        dist.destroy_process_group()


@pytest.mark.threat("N5")
def test_pipes_are_given_up_before_the_group_is(workers: Workers) -> None:
    """The timeout is shorter than the time that a rank may otherwise take."""
    env = {**with_settings({}, threads=2), "SEALRING_TRANSPORT": "tcp"}
    assert workers.run(pipes_never_come, world=2, env=env, group=False) == [1, 1]


def cannot_make_lanes_twice(rank: int, world: int) -> tuple[list[int], list[tuple[str, int]]]:
    """The first program's ranks have their lanes. One of the second's cannot make them."""
    seen = [agrees(rank, world)]
    works = Exchange.open_agreed

    def fails(*_: Any) -> None:
        raise Unsupported("no further pipe today")

    if rank == 2:
        Exchange.open_agreed = fails  # type: ignore[assignment]
    try:
        for root in (1, 1, 3):  # a second time, and another program
            tensor = torch.full((LARGE,), float(rank))
            dist.broadcast(tensor, root)
            assert tensor.eq(root).all()
    finally:
        Exchange.open_agreed = works  # type: ignore[method-assign]
    seen.append(agrees(rank, world))
    made = group().engine.lanes.counts
    return seen, sorted((uses[0].name, count) for uses, count in made.items())


def test_what_has_no_further_pipes_uses_one_thread_and_the_rest_goes_on(workers: Workers) -> None:
    env = with_settings({}, threads=2, algorithm="all_reduce=ring,broadcast=tree")  # fmt: skip
    results = workers.run(
        linked_when_needed, cannot_make_lanes_twice, world=4, env=env, group=False
    )
    assert [seen for seen, _ in results] == [[2, 2]] * 4
    assert len({tuple(made) for _, made in results}) == 1  # all ranks know the same
    assert set(results[0][1]) == {("ALL_REDUCE", 2), ("BROADCAST", 1)}


def has_no_descriptor_left(rank: int, world: int) -> int:
    dist.all_reduce(torch.ones(100 * world))  # the program's links
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as taken:
        taken.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        if rank == world - 1:
            used = max(int(each) for each in os.listdir("/proc/self/fd"))
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, before[1]))
            with contextlib.suppress(OSError):
                while True:
                    taken.callback(os.close, os.open("/dev/null", os.O_RDONLY))
        return agrees(rank, world)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_rank_that_can_make_neither_lanes_nor_links_says_so(
    workers: Workers, transport: str
) -> None:
    """Sending its reason needs no link that the group does not have."""
    env = {
        "SEALRING_TRANSPORT": transport, **with_settings({}, threads=2, algorithm="ring"),
    }  # fmt: skip
    one = workers.run(linked_when_needed, has_no_descriptor_left, world=4, env=env, group=False)
    assert one == [1] * 4


def ends(rank: int, world: int, folder: str) -> None:
    before = open_after_a_group(folder, rank, world)
    made = make(folder, rank, world)
    made.allreduce([torch.ones(LARGE)]).wait()
    assert made.threads == 2
    made.shutdown()
    del made
    assert returns_to(before), (before, what_is_open())


def test_threads_descriptors_and_memory_end_with_the_group(
    workers: Workers, tmp_path: Path
) -> None:
    for transport in ("shm", "tcp"):
        folder = tmp_path / transport
        folder.mkdir()
        env = {"SEALRING_TRANSPORT": transport, **with_settings({}, threads=2)}
        workers.run(ends, str(folder), world=2, env=env, group=False)


def disagree(rank: int, world: int) -> None:
    dist.all_reduce(torch.ones(LARGE))
    with pytest.raises(OutOfStep):
        dist.all_reduce(torch.ones(LARGE + rank))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.threat("N6")
def test_ranks_that_disagree_get_one_error(workers: Workers, transport: str) -> None:
    env = {"SEALRING_TRANSPORT": transport, **with_settings({}, threads=2)}
    workers.run(disagree, world=2, env=env)


def is_interrupted(rank: int, world: int) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    works = Exchange.open_agreed
    if rank == 1:
        Exchange.open_agreed = interrupt  # type: ignore[assignment]
    try:
        with pytest.raises(KeyboardInterrupt if rank == 1 else GroupClosed) as told:
            dist.all_reduce(torch.ones(LARGE))
    finally:
        Exchange.open_agreed = works  # type: ignore[method-assign]
    if rank != 1:
        assert told.value.reported_by == 1  # type: ignore[attr-defined]


def test_an_interrupt_while_ranks_agree_on_lanes_is_told_to_the_others(workers: Workers) -> None:
    workers.run(is_interrupted, world=3, env={**with_settings({}, threads=2), "CASE": "interrupt"})


def cannot_run_its_part(rank: int, world: int) -> None:
    if rank == 1:
        group().engine.lanes.count_for = lambda _: 2
    kind = ValueError if rank == 1 else GroupClosed
    with pytest.raises(kind, match="needs lanes that are not there"):
        dist.all_reduce(torch.ones(5))


def test_the_others_are_told_why_a_rank_could_not_run_a_collective(workers: Workers) -> None:
    """They get the rank's own error, whatever it is, and not an interrupt of the script."""
    workers.run(
        cannot_run_its_part, world=2, env={**with_settings({}, threads=1), "CASE": "cannot run"}
    )


@pytest.mark.parametrize("number", [0, "many", -1, 100000])
def test_threads_are_no_more_than_cores(number: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"may use {usable_cores()} cores"):
        read_settings(with_settings({}, threads=number))


def test_threads_are_left_to_the_group_unless_set() -> None:
    assert read_settings({}).threads is None
    assert read_settings(with_settings({}, threads=2)).threads == 2
