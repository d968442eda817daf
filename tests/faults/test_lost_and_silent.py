"""Real processes are killed, stopped or slow; every other rank says which one, where and when."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sealring.core.settings import with_settings
from sealring.errors import PeerLost, PeerSilent
from tests.faults.expected import assert_names
from tests.workers import Workers

both_transports = pytest.mark.parametrize("transport", ["shm", "tcp"])


def warm_up() -> list[int]:
    """Runs collective 1; returns the process ids of all ranks."""
    pids = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    pids[dist.get_rank()] = os.getpid()
    dist.all_reduce(pids)
    return [int(pid) for pid in pids]


class Expendable:
    """Five workers; the highest that is still alive may be killed, one after the other."""

    def __init__(self) -> None:
        self.workers = Workers(5)
        self.world = 5

    def kill_the_last(self, transport: str, idle: bool) -> tuple[int, list[object]]:
        last = self.world - 1
        environment = {"SEALRING_TRANSPORT": transport}
        results = self.workers.run(dies, idle, world=self.world, env=environment, errors=True)
        self.world -= 1
        return last, results[:last]


@pytest.fixture(scope="module")
def expendable() -> Iterator[Expendable]:
    started = Expendable()
    yield started
    started.workers.close()


def is_running(pid: int) -> bool:
    """Tells whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def dies(rank: int, world: int, idle: bool) -> str:
    pids = warm_up()
    if rank == world - 1:
        # By then the others wait for this rank in a collective, or are about to.
        time.sleep(0 if idle else 0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    while idle and is_running(pids[-1]):
        time.sleep(0.01)
    dist.all_reduce(torch.ones(1000))
    return "reduced"


@both_transports
@pytest.mark.parametrize("idle", [False, True], ids=["in-a-collective", "while-idle"])
@pytest.mark.threat("F3")
def test_a_killed_rank_is_lost_to_every_other(
    expendable: Expendable, transport: str, idle: bool
) -> None:
    last, results = expendable.kill_the_last(transport, idle)
    for error in results:
        assert_names(error, last, 2, "all_reduce", PeerLost)


def in_turn(*calls: Callable[[], object]) -> None:
    """Runs the calls in turn: the first may still succeed before the news of the closed group."""
    for call in calls:
        call()


def learns_it_was_given_up(call: Callable[[], object]) -> str:
    with pytest.raises(PeerSilent, match=f"reported: .*rank {dist.get_rank()}") as raised:
        in_turn(call, dist.barrier)
    assert raised.value.reported_by is not None
    return "was told"


def stops(rank: int, world: int, idle: bool) -> str:
    dist.group.WORLD.set_timeout(timedelta(seconds=2))  # type: ignore[union-attr]
    pids = warm_up()
    if rank == world - 1:
        time.sleep(0 if idle else 0.3)
        os.kill(os.getpid(), signal.SIGSTOP)
        return learns_it_was_given_up(lambda: dist.all_reduce(torch.ones(1000)))
    try:
        if idle:
            time.sleep(0.5)
        dist.all_reduce(torch.ones(1000))
    finally:
        os.kill(pids[-1], signal.SIGCONT)
    return "reduced"


@both_transports
@pytest.mark.parametrize("idle", [False, True], ids=["in-a-collective", "while-idle"])
@pytest.mark.threat("F4")
def test_a_stopped_rank_is_silent_to_every_other(
    workers: Workers, transport: str, idle: bool
) -> None:
    environment = {"SEALRING_TRANSPORT": transport}
    results = workers.run(stops, idle, world=3, env=environment, errors=True)
    for error in results[:2]:
        assert_names(error, 2, 2, "all_reduce", PeerSilent)
    assert results[2] == "was told"


def is_slow(rank: int, world: int, seconds: float) -> str:
    dist.group.WORLD.set_timeout(timedelta(seconds=2))  # type: ignore[union-attr]
    warm_up()
    if rank == 1:
        time.sleep(seconds)
    if rank == 1 and seconds > 2:
        return learns_it_was_given_up(lambda: dist.broadcast(torch.ones(1000), src=1))
    dist.broadcast(torch.ones(1000), src=1)
    return "done"


@pytest.mark.threat("F4")
def test_a_rank_slower_than_the_timeout_is_silent_and_is_told_so(workers: Workers) -> None:
    results = workers.run(is_slow, 3.0, world=3, errors=True)
    for rank in (0, 2):
        assert_names(results[rank], 1, 2, "broadcast", PeerSilent)
    assert results[1] == "was told"


def test_a_rank_slower_than_the_others_within_the_timeout_is_waited_for(workers: Workers) -> None:
    assert workers.run(is_slow, 1.0, world=3) == ["done"] * 3


def is_silent_in_a_subgroup(rank: int, world: int) -> str:
    pair = dist.new_group([1, 2], timeout=timedelta(seconds=1))
    if rank == 1:
        dist.all_reduce(torch.ones(1000), group=pair)
    return "stayed away"


def test_in_a_subgroup_the_rank_is_named_by_its_number_in_the_job(workers: Workers) -> None:
    results = workers.run(is_silent_in_a_subgroup, world=3, errors=True)
    assert_names(results[1], 2, 1, "all_reduce", PeerSilent)


def stops_in_a_ring(rank: int, world: int) -> str:
    dist.group.WORLD.set_timeout(timedelta(seconds=2))  # type: ignore[union-attr]
    pids = warm_up()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return "woken"
    try:
        dist.all_reduce(torch.ones(1 << 19))
    finally:
        os.kill(pids[1], signal.SIGCONT)
    return "reduced"


def test_in_a_ring_no_rank_hangs_behind_a_stopped_one(workers: Workers) -> None:
    """Rank 3 waits for rank 2, which waits for rank 1 and has told rank 3 so."""
    environment = with_settings({}, algorithm="ring")
    results = workers.run(stops_in_a_ring, world=4, env=environment, errors=True)
    for rank in (0, 2, 3):
        assert_names(results[rank], 1, 2, "all_reduce", PeerSilent)
