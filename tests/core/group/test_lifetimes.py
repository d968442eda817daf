"""Groups that are made and destroyed: repeatedly, side by side, nested, and each alone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sealring.core.engine.engine import CollectiveEngine
from sealring.core.group import create
from sealring.core.handshake import process_sessions
from sealring.errors import (
    ConfigurationError,
    GroupClosed,
    GroupError,
    OutOfStep,
    PeerLost,
    PeerSilent,
)
from tests.workers import Workers


def what_is_open() -> tuple[list[str], list[str]]:
    """Shared memory and threads of the groups in this process.

    The thread that answers `sealring top` is the process's own, and stays until its end.
    """
    links = Path("/proc/self/maps").read_text().splitlines()
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # the one that listed them
            continue
    memory = [link for link in links if "/memfd:sealring" in link]
    names = [thread.name for thread in threading.enumerate()]
    threads = [name for name in names if "sealring " in name and name != "sealring live"]
    return memory, threads


def total(group: dist.ProcessGroup | None = None) -> float:
    tensor = torch.ones(1000)
    dist.all_reduce(tensor, group=group)
    return tensor[-1].item()


def twice(group: dist.ProcessGroup | None = None) -> None:
    """All that the first needs may have come before the news that the group is closed."""
    total(group)
    total(group)


def again_and_again(rank: int, world: int) -> list[str]:
    ended = []
    for attempt in range(4):
        dist.init_process_group("sealring")
        assert total() == world
        if attempt == 1:  # a group that failed is no obstacle to the next one
            with pytest.raises(OutOfStep):
                dist.all_reduce(torch.ones(1000 if rank else 2000))
            ended.append("failed")
        elif attempt == 2:
            torch.distributed.distributed_c10d._abort_process_group()
            ended.append("aborted")
        else:
            ended.append("done")
        if dist.is_initialized():
            dist.destroy_process_group()
        assert what_is_open() == ([], [])
    return ended


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_groups_are_made_again_in_the_same_processes(workers: Workers, transport: str) -> None:
    environment = {"SEALRING_TRANSPORT": transport}
    results = workers.run(again_and_again, world=3, group=False, env=environment)
    assert results == [["done", "failed", "aborted", "done"]] * 3


class Recorded(CollectiveEngine):
    """The real engine, which also records the keys it was given and each key's peer."""

    groups: list[dict[str, Any]] = []  # noqa: RUF012 (a process's own)

    def __init__(self, rank: int, world: int, *, links: Any, members: Any, **options: Any) -> None:
        links = list(links)
        Recorded.groups.append(
            {
                "own": (bytes(options["group_key"]), options["context"]),
                "sent": {members[peer]: bytes(link.send_key) for peer, link in links},
                "received": {members[peer]: bytes(link.receive_key) for peer, link in links},
                "theirs": {members[peer]: bytes(link.peer_group_key) for peer, link in links},
            }
        )
        super().__init__(rank, world, links=links, members=members, **options)


def keys_of_five_groups(rank: int, world: int) -> list[dict[str, Any]]:
    Recorded.groups = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(create, "CollectiveEngine", Recorded)
        dist.init_process_group("sealring")
        same_ranks = dist.new_group([0, 1, 2])
        outer = dist.new_group([0, 1])
        if rank < 2:
            inner = dist.new_group([1, 0], use_local_synchronization=True)
            assert (total(outer), total(inner)) == (2, 2)
        assert (total(), total(same_ranks)) == (3, 3)
        dist.destroy_process_group()
        dist.init_process_group("sealring")
        assert total() == 3
        dist.destroy_process_group()
    return Recorded.groups


@pytest.mark.threat("F7")
def test_every_group_has_keys_of_its_own(workers: Workers) -> None:
    groups = workers.run(keys_of_five_groups, world=3, group=False)
    assert [len(of_rank) for of_rank in groups] == [5, 5, 3]
    sent = [key for of_rank in groups for group in of_rank for key in group["sent"].values()]
    own = [group["own"][0] for of_rank in groups for group in of_rank]
    assert len(set(sent + own)) == len(sent) + len(own), "no key twice, in any group"
    contexts = [group["own"][1] for group in groups[0]]
    assert len(set(contexts)) == 5
    for zero, one in zip(groups[0], groups[1], strict=True):  # both ends have the same ones
        assert zero["own"][1] == one["own"][1]
        assert zero["sent"][1] == one["received"][0]
        assert zero["theirs"][1] == one["own"][0]


def handshakes_of_six_groups(rank: int, world: int) -> tuple[int, int]:
    for _ in range(2):
        dist.init_process_group("sealring")
        for members in ([0, 1, 2], [0, 1]):
            group = dist.new_group(members)
            if rank in members:
                assert total(group) == len(members)
        dist.destroy_process_group()
    sessions = process_sessions("sessions", rank)
    return sessions.handshakes, sessions.resumptions


def test_two_processes_shake_hands_once(workers: Workers) -> None:
    """Each group of n has two links of each pair: for collectives and for messages."""
    only_here = {"SEALRING_JOB": "sessions"}
    results = workers.run(handshakes_of_six_groups, world=3, group=False, env=only_here)
    # Ranks 0 and 1 are in six groups, rank 2 is in four of them.
    assert results == [(2, 8 + 12 - 2), (2, 8 + 12 - 2), (2, 16 - 2)]


def nested(rank: int, world: int) -> list[float]:
    half, halves = dist.new_subgroups(2)
    assert len(halves) == 2
    odd_even, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    sums = [total(half), total(odd_even), total()]
    members = torch.tensor([float(rank)])
    dist.all_reduce(members, group=odd_even)
    dist.destroy_process_group(half)  # the others do not mind
    return [*sums, members.item(), total(odd_even), total()]


def test_subgroups_across_each_other(workers: Workers) -> None:
    results = workers.run(nested, world=4)
    assert results == [[2.0, 2.0, 4.0, 2.0 + 2 * (rank % 2), 2.0, 4.0] for rank in range(4)]


def timeouts(rank: int, world: int) -> str:
    brief = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    patient = dist.new_group([0, 1], timeout=timedelta(seconds=120))
    if rank == 1:
        time.sleep(2.5)
    if rank == 0:
        work = dist.all_reduce(torch.ones(1000), group=patient, async_op=True)
        with pytest.raises(PeerSilent, match="1 s"):
            total(brief)
        work.wait()
    else:
        with pytest.raises(PeerSilent, match="rank 0 reported"):
            twice(brief)
        total(patient)
    with pytest.raises(PeerSilent):  # it stays closed, and says why
        total(brief)
    assert total() == total(patient) == 2
    return "the other groups live on"


def test_each_group_has_its_own_timeout(workers: Workers) -> None:
    only_here = {"SEALRING_JOB": "timeouts"}
    assert workers.run(timeouts, world=2, env=only_here) == ["the other groups live on"] * 2


def aborts(rank: int, world: int) -> str:
    other = dist.new_group([0, 1])
    assert other is not None
    if rank == 0:
        work = dist.all_reduce(torch.ones(1000), group=other, async_op=True)
        time.sleep(0.2)
        other.abort()
        with pytest.raises(GroupClosed):
            work.wait()
    dist.barrier()
    with pytest.raises(GroupClosed, match="destroyed" if rank == 0 else "rank 0 reported"):
        twice(other)
    return "aborted"


def test_abort_ends_what_is_under_way_on_both_sides(workers: Workers) -> None:
    assert workers.run(aborts, world=2) == ["aborted"] * 2


def form_where_one_cannot_record(rank: int, world: int, done: Path) -> type:
    """The rank that fails keeps its error, and with it all that the traceback refers to."""
    try:
        dist.init_process_group("sealring", timeout=timedelta(seconds=10))
        with pytest.raises(GroupError) as caught:
            twice()
    except ConfigurationError as error:
        kept = error
        while not done.exists():
            time.sleep(0.01)
        return type(kept)
    done.touch()
    dist.destroy_process_group()
    return caught.type


def test_a_rank_that_fails_after_the_group_was_made_is_not_waited_for(
    workers: Workers, tmp_path: Path
) -> None:
    nowhere = {0: {"_SEALRING_RECORD": "/proc/nowhere/record"}}
    kinds = workers.run(
        form_where_one_cannot_record, tmp_path / "done", group=False, rank_env=nowhere
    )
    assert kinds == [ConfigurationError, PeerLost]


def no_thread(name: str) -> Callable[[threading.Thread], None]:
    start = threading.Thread.start

    def start_or_not(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    return start_or_not


def form_without_a_thread(rank: int, world: int, name: str, done: Path) -> str:
    """The rank that fails keeps its error, and with it all that the traceback refers to."""
    before = what_is_open()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(threading.Thread, "start", no_thread(name))
        try:
            dist.init_process_group("sealring", timeout=timedelta(seconds=30))
        except ConfigurationError as error:
            kept = error
            while not done.exists():
                time.sleep(0.01)
            assert what_is_open() == before
            return str(kept)
    with pytest.raises(PeerLost) as caught:
        twice()
    done.touch()
    dist.destroy_process_group()
    return f"lost {caught.value.peer}"


def test_a_rank_without_a_thread_for_its_group_is_not_waited_for(
    workers: Workers, tmp_path: Path
) -> None:
    told = workers.run(form_without_a_thread, "sealring rank 0", tmp_path / "done", group=False)
    assert told == [
        "this worker cannot form a group (can't start new thread): raise this user's limit of "
        "processes (ulimit -u), or the container's",
        "lost 0",
    ]


def form_without_being_shown(rank: int, world: int, folder: Path) -> float:
    os.environ["SEALRING_LIVE"] = str(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread("sealring live"))
        dist.init_process_group("sealring", timeout=timedelta(seconds=30))
    return total()


def test_a_worker_that_cannot_be_shown_has_its_group(workers: Workers, tmp_path: Path) -> None:
    folder = tmp_path / "live"
    assert workers.run(form_without_being_shown, folder, group=False) == [2, 2]
    assert list(folder.iterdir()) == []


def sends_without_a_thread(rank: int, world: int) -> str:
    dist.init_process_group("sealring", timeout=timedelta(seconds=30))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(threading.Thread, "start", no_thread("sealring messages rank 0"))
        with pytest.raises(GroupClosed) as caught:
            dist.recv(torch.ones(4), 1 - rank)
        with pytest.raises(GroupClosed):
            total()
    dist.destroy_process_group()
    return str(caught.value)


def test_a_rank_without_a_thread_for_its_messages_says_so(workers: Workers) -> None:
    told = workers.run(sends_without_a_thread, group=False)
    assert all("no thread to move its messages (can't start new thread)" in each for each in told)
    assert "rank 0 reported" in told[1]
