"""Groups made from a store, a rank and a size, apart from torch's default group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions

import sealring
from sealring.errors import ConfigurationError, GroupClosed, PeerLost
from tests.workers import SECRET, Workers


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    monkeypatch.setenv("SEALRING_JOB", "apart")


def a_world_of_one(folder: str, rank: int) -> None:
    store = dist.FileStore(f"{folder}/world-of-{rank}", 1)
    dist.init_process_group("sealring", store=store, rank=0, world_size=1)


def sum_of(group: Any, value: float) -> float:
    tensor = torch.full((1000,), value)
    group.allreduce([tensor]).wait()
    return tensor[-1].item()


def by_call(rank: int, world: int, folder: str) -> float:
    a_world_of_one(folder, rank)
    group = sealring.create_group(dist.FileStore(f"{folder}/store", world), rank, world)
    assert group.options.global_ranks_in_group == list(range(world))
    return sum_of(group, rank + 1.0)


def by_registered_creator(rank: int, world: int, folder: str) -> float:
    a_world_of_one(folder, rank)
    options: Any = _DistributedBackendOptions()
    options.store = dist.FileStore(f"{folder}/store", world)
    options.group_rank, options.group_size = rank, world
    options.timeout = timedelta(minutes=1)
    options.group_id = "apart"
    options.global_ranks_in_group = []
    creator: Callable[..., Any] = dist.Backend._plugins["SEALRING"].creator_fn
    return sum_of(creator(options, None), rank + 1.0)


@pytest.mark.parametrize("made", [by_call, by_registered_creator])
def test_a_group_that_is_larger_than_torchs_world(
    workers: Workers, tmp_path: Path, made: Callable[..., float]
) -> None:
    assert workers.run(made, str(tmp_path), world=3, group=False) == [6.0] * 3


def in_threads(size: int, act: Callable[[int], Any]) -> list[Any]:
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = act(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.usefixtures("job")
def test_ranks_that_are_threads_of_one_process_make_one_group_after_the_other() -> None:
    store = dist.HashStore()

    def act(rank: int) -> list[float]:
        sums = []
        for quorum in range(3):
            prefix = dist.PrefixStore(f"quorum/{quorum}", store)
            group = sealring.create_group(prefix, rank, 3, name=f"quorum_{quorum}")
            sums.append(sum_of(group, rank + 1.0))
            group.abort() if quorum == 1 else group.shutdown()
            with pytest.raises(GroupClosed):
                sum_of(group, 1.0)
        return sums

    assert in_threads(3, act) == [[6.0] * 3] * 3


@pytest.mark.usefixtures("job")
def test_members_are_named_by_their_ranks_in_the_job() -> None:
    store = dist.HashStore()
    here = threading.Barrier(2)

    def act(rank: int) -> Any:
        group = sealring.create_group(store, rank, 2, job_ranks=[7, 4], job_size=9)
        sum_of(group, 1.0)
        here.wait()
        if rank == 0:
            return group.shutdown()
        with pytest.raises(PeerLost) as caught:
            sum_of(group, 1.0)
        return caught.value.peer

    assert in_threads(2, act) == [None, 7]


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        ((2, 2), {}, "rank 2 does not exist in a group of 2"),
        ((-1, 2), {}, "rank -1 does not exist in a group of 2"),
        ((0, 2), {"job_ranks": [3]}, "the group has 2 ranks, and 1 ranks"),
        ((0, 2), {"job_ranks": [3, 3]}, "not different ranks"),
        ((0, 2), {"job_ranks": [0, 4], "job_size": 4}, "not different ranks of a world of 4"),
        ((1, 2), {"job_ranks": [0, 4], "job_size": 4}, "rank 4 does not exist in a world of 4"),
    ],
)
def test_what_cannot_be_a_group_is_refused(
    arguments: tuple[int, int], options: dict[str, Any], says: str
) -> None:
    limit = timedelta(seconds=5)
    with pytest.raises(ConfigurationError, match=says):
        sealring.create_group(dist.HashStore(), *arguments, timeout=limit, **options)
