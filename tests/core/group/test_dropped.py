"""Groups whose last reference is dropped close, leave nothing behind, and their peers learn it."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import sealring
from sealring.core.links.threads import IDLE_NAME
from sealring.errors import GroupError, PeerLost
from tests.workers import Workers

HALF_AN_HOUR = timedelta(minutes=30)


def make(folder: str, rank: int, world: int) -> Any:
    store = dist.FileStore(f"{folder}/store", world)
    return sealring.create_group(store, rank, world, timeout=HALF_AN_HOUR)


Open = tuple[Counter[str], Counter[str], int]


def what_is_open() -> Open:
    """The process's threads, its descriptors by their targets, and mappings of sealring's
    memory."""
    descriptors: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            descriptors[os.readlink(f"/proc/self/fd/{fd}").partition(":[")[0]] += 1
        except OSError:  # the one that listed them
            continue
    maps = Path("/proc/self/maps").read_text().count("/memfd:sealring")
    names = Counter(thread.name for thread in threading.enumerate())
    del names[IDLE_NAME]  # of threads that any group may borrow
    return names, descriptors, maps


def open_after_a_group(folder: str, rank: int, world: int) -> Open:
    """What stays open in a process after its first group, once all closing is done."""
    Path(folder, "first").mkdir(exist_ok=True)
    make(f"{folder}/first", rank, world).shutdown()
    before, now = None, what_is_open()
    while now != before:
        gc.collect()
        time.sleep(0.5)
        before, now = now, what_is_open()
    return now


def returns_to(before: Open) -> bool:
    for _ in range(100):
        if what_is_open() == before:
            return True
        time.sleep(0.1)
        gc.collect()  # an error's traceback refers to the group's parts, in a cycle
    return False


def drops(rank: int, world: int, folder: str) -> str:
    before = open_after_a_group(folder, rank, world)
    group = make(folder, rank, world)
    group.allreduce([torch.ones(1000)]).wait()
    assert what_is_open() != before
    if rank == 0:
        del group
        assert returns_to(before), (before, what_is_open())
        return "closed"
    with pytest.raises(PeerLost, match="Connection closed by peer") as caught:
        group.allreduce([torch.ones(1000)]).wait()
    assert caught.value.peer == 0
    del group, caught
    assert returns_to(before), (before, what_is_open())
    return "told"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_dropped_group_closes_and_its_peer_is_told_at_once(
    workers: Workers, tmp_path: Path, transport: str
) -> None:
    env = {"SEALRING_TRANSPORT": transport}
    results = workers.run(drops, str(tmp_path), group=False, env=env)
    assert results == ["closed", "told"]


def drops_with_works_under_way(rank: int, world: int, folder: str) -> list[float]:
    group = make(folder, rank, world)
    reduced, received = torch.full((70000,), rank + 1.0), torch.zeros(5)
    works = [group.allreduce([reduced])]
    if rank == 0:
        works.append(group.recv([received], 1, 3))
    else:
        time.sleep(0.3)  # rank 0 has dropped its group by now
        works.append(group.send([torch.full((5,), 9.0)], 0, 3))
    del group
    gc.collect()
    for work in works:
        work.wait()
    return [reduced[-1].item(), received[0].item()]


def test_works_under_way_keep_what_they_need(workers: Workers, tmp_path: Path) -> None:
    results = workers.run(drops_with_works_under_way, str(tmp_path), group=False)
    assert results == [[3.0, 9.0], [3.0, 0.0]]


def drops_after_failures(rank: int, world: int, folder: str) -> str:
    before = open_after_a_group(folder, rank, world)
    caught: list[str] = []

    def fails(group: Any, call: str) -> None:  # the errors' tracebacks refer to this frame
        try:
            if call == "collective":
                group.allreduce([torch.ones(1000 * (rank + 1))]).wait()
            else:
                group.set_timeout(timedelta(seconds=0.5))
                group.recv([torch.ones(5)], 1 - rank, 3).wait()
        except GroupError as error:
            caught.append(type(error).__name__)

    for number, call in enumerate(("collective", "message")):
        group = make(f"{folder}/{number}", rank, world)
        for _ in range(2):  # the second time it is the error that the group has kept
            fails(group, call)
        del group
        assert returns_to(before), (before, what_is_open())
    return " ".join(caught)


def test_a_group_that_failed_is_dropped_like_any_other(workers: Workers, tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / str(number)).mkdir()
    results = workers.run(drops_after_failures, str(tmp_path), group=False)
    assert results == ["OutOfStep OutOfStep PeerSilent PeerSilent"] * 2


def drops_in_odd_places(rank: int, world: int, folder: str) -> str:
    before = open_after_a_group(folder, rank, world)
    # In a reference cycle, which another thread's garbage collection finds.
    cycle: dict[str, Any] = {"group": make(f"{folder}", rank, world)}
    cycle["itself"] = cycle
    cycle["group"].allreduce([torch.ones(3)]).wait()
    del cycle
    collector = threading.Thread(target=gc.collect)
    collector.start()
    collector.join()
    assert returns_to(before), (before, what_is_open())
    # In a callback of its own, on the thread that runs its collectives.
    held = [make(f"{folder}/second", rank, world)]
    threads = []
    work = held[0].allreduce([torch.ones(100000)])
    future = work.get_future().then(lambda _: (threads.append(threading.get_ident()), held.clear()))
    future.wait()
    assert not held
    del work, future
    assert returns_to(before), (before, what_is_open())
    return "closed twice"


def test_a_group_is_dropped_by_a_collection_or_in_its_own_callback(
    workers: Workers, tmp_path: Path
) -> None:
    (tmp_path / "second").mkdir()
    results = workers.run(drops_in_odd_places, str(tmp_path), group=False)
    assert results == ["closed twice"] * 2
