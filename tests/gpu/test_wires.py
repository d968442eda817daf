"""Every wire between GPUs gives the CPU's results, and is the one that was asked for."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sealring.core.settings import with_settings
from sealring.errors import Unsupported, WorkerFailed
from sealring.lab.bench.workers import Report, run_workers
from tests.gpu.shared_gpu import each_wire, enter, environment_of
from tests.gpu.test_group import every_collective, in_group

# Only the same algorithm gives the same bits; this one forwards no records.
SAME = with_settings({}, algorithm="hierarchical")


def wired_and_right(rank: int) -> tuple[bool, list[str]]:
    wrong = every_collective(rank)
    group: Any = dist.group.WORLD
    return group.engine.wired, wrong


@each_wire
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_collective(ranks: int, wire: str) -> None:
    found = in_group(ranks, wired_and_right, **environment_of(wire, **SAME))
    assert found == [(wire != "links", [])] * ranks


def test_nccl_without_its_kernels_loaded() -> None:
    environment = {"SEALRING_GPU_WIRE": "nccl", "CUDA_MODULE_LOADING": "LAZY"}
    with pytest.raises(WorkerFailed, match="set CUDA_MODULE_LOADING=EAGER"):
        in_group(2, wired_and_right, **environment)


def sums_of_many_sizes(rank: int) -> list[int]:
    """Reduces whole and partial runs of several records; returns the sizes with wrong sums."""
    wrong = []
    for size in (65_536, 65_537, 524_288 * 3 + 5, 9_000_001, 40_000_000):
        data = torch.full((size,), float(rank + 1), device="cuda")
        data[-1] = 100.0 * (rank + 1)
        dist.all_reduce(data)
        total = sum(range(1, dist.get_world_size() + 1))
        if not (bool((data[:-1] == total).all()) and data[-1].item() == 100.0 * total):
            wrong.append(size)
    return wrong


@each_wire
def test_long_tensors(wire: str) -> None:
    assert in_group(4, sums_of_many_sizes, **environment_of(wire)) == [[]] * 4


def on_one_of_two_hosts(rank: int) -> tuple[bool, list[str], list[int]]:
    """Uses peer memory inside each host and NCCL between hosts; results must equal the CPU's."""
    group: Any = dist.group.WORLD
    wrong = every_collective(rank)
    return group.engine.exchanges, wrong, sums_of_many_sizes(rank)


def on_two_hosts(rank: int, report: Report) -> None:
    enter(rank)
    os.environ.update(with_settings(os.environ, host=f"host-{rank // 2}"))
    dist.init_process_group("sealring")
    report(on_one_of_two_hosts(rank))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.timeout(300)
def test_two_hosts_with_two_ranks_each() -> None:
    environment = environment_of("nccl", **SAME)
    found = dict(run_workers(4, on_two_hosts, environment=environment))
    assert found == dict.fromkeys(range(4), (True, [], []))


@pytest.mark.timeout(300)
def test_twelve_ranks_over_nccl() -> None:
    assert in_group(12, sums_of_many_sizes, **environment_of("nccl")) == [[]] * 12


def sums_and_every_collective(rank: int) -> tuple[list[int], list[str]]:
    return sums_of_many_sizes(rank), every_collective(rank)


def a_large_group(rank: int) -> tuple[list[int], int, float, list[str]]:
    """Returns wrong sums, the links in use, a value from an unlinked rank, wrong calls."""
    group: Any = dist.group.WORLD
    world = dist.get_world_size()
    wrong = sums_of_many_sizes(rank)
    links = len(group.engine.link_sockets)
    got = torch.zeros(3_000_000, device="cuda")
    sent = torch.full_like(got, float(rank))
    for work in [dist.isend(sent, (rank + 5) % world), dist.irecv(got, (rank - 5) % world)]:
        assert work is not None
        work.wait()
    return wrong, links, got[-1].item(), every_collective(rank)


@pytest.mark.parametrize("ranks", [4, 10])
@pytest.mark.parametrize("wait", ["host", "stream"])
@pytest.mark.timeout(300)
def test_a_ring_over_nccl(ranks: int, wait: str) -> None:
    """A rank seals again for the next rank what it would otherwise forward."""
    environment = environment_of(
        "nccl",
        **with_settings({}, cuda_wait=wait, algorithm="ring"),
    )
    for wrong, others in in_group(ranks, sums_and_every_collective, **environment):
        assert (wrong, others) == ([], [])


@each_wire
@pytest.mark.parametrize("wait", ["host", "stream"])
@pytest.mark.timeout(300)
def test_a_group_that_makes_its_links_when_gpus_need_them(wire: str, wait: str) -> None:
    algorithm = "ring" if wire == "links" else "hierarchical"
    environment = environment_of(wire, **with_settings({}, cuda_wait=wait, algorithm=algorithm))
    found = in_group(10, a_large_group, **environment)
    for rank, (wrong, links, got, others) in enumerate(found):
        assert (wrong, got, others) == ([], float((rank - 5) % 10), [])
        assert links < 9 or wire != "links"


class NoRoom:
    """An engine whose GPU takes no further key."""

    def put_late_keys(self) -> None:
        raise RuntimeError("no room for a key")


def a_first_program_beside_a_message(rank: int) -> float:
    """All ranks receive, then call a program whose links no GPU has, then send."""
    world = dist.get_world_size()
    data = torch.ones(1000, device="cuda")
    dist.all_reduce(data)
    got, sent = torch.zeros(1000, device="cuda"), torch.full((1000,), 1.0 + rank, device="cuda")
    work = dist.irecv(got, (rank - 3) % world)
    for root in range(3):
        dist.broadcast(data, root)
    dist.isend(sent, (rank + 3) % world)
    assert work is not None
    work.wait()
    return got[-1].item()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("wait", ["stream", "host"])
def test_nccl_is_connected_while_a_message_is_awaited(wait: str) -> None:
    """A message's kernel runs until the message has come, and connecting must not wait for it."""
    environment = environment_of("nccl", **with_settings({}, cuda_wait=wait))
    found = in_group(10, a_first_program_beside_a_message, **environment)
    assert found == [1.0 + (rank - 3) % 10 for rank in range(10)]


def a_gpu_without_room(rank: int) -> tuple[str, float]:
    """The other ranks must neither wait in NCCL for this GPU nor give up their connections."""
    dist.all_reduce(torch.ones(10, device="cuda"))
    group: Any = dist.group.WORLD
    programs = group.engine.on_gpus
    whole = programs._native
    if rank == 7:
        programs._native = NoRoom()
    tensor = torch.full((1000,), float(rank), device="cuda")
    with pytest.raises(Unsupported) as refused:
        dist.broadcast(tensor, 3)
    programs._native = whole
    dist.broadcast(tensor, 3)
    dist.all_reduce(tensor)
    return str(refused.value), tensor[-1].item()


@each_wire
@pytest.mark.timeout(300)
def test_a_gpu_that_takes_no_key_is_the_error_of_all_ranks(wire: str) -> None:
    told = "GPUs cannot run broadcast: rank 7: no room for a key"
    environment = environment_of(wire, **SAME)
    assert in_group(10, a_gpu_without_room, **environment) == [(told, 30.0)] * 10


def several_groups(rank: int) -> list[float]:
    """Each group has its own memory areas, and a new group follows one that is gone."""
    found = []
    for turn in range(3):
        group = dist.new_group([0, 1], backend="sealring")
        if rank < 2:
            data = torch.full((3_000_000,), float(rank + turn), device="cuda")
            dist.all_reduce(data, group=group)
            found.append(data.sum().item() / 3_000_000)
            dist.destroy_process_group(group)
    return found


@pytest.mark.parametrize("wire", ["auto", "nccl"])
def test_groups_come_and_go(wire: str) -> None:
    found = in_group(3, several_groups, **environment_of(wire))
    assert found == [[1.0, 3.0, 5.0], [1.0, 3.0, 5.0], []]
