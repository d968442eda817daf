"""Messages of CUDA tensors between the ranks of a process group, several of them on one GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sealring.core.settings import with_settings
from sealring.errors import GroupClosed, OutOfStep, PeerLost
from sealring.lab.bench.workers import Report, run_workers
from tests.gpu.test_streams import introduced


@pytest.fixture(params=["host", "stream"])
def waiting(request: pytest.FixtureRequest) -> dict[str, str]:
    """The messages are the same, whether the host or a stream waits for them."""
    return with_settings({}, cuda_wait=request.param)


def in_group(ranks: int, body: Callable[..., Any], **environment: str) -> list[Any]:
    """Returns what body(rank) returns on each rank of a group on one GPU."""
    found = dict(run_workers(ranks, _member, body, environment=environment))
    return [found[rank] for rank in range(ranks)]


def _member(rank: int, report: Report, body: Callable[..., Any]) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("sealring")
    introduced()  # earlier, no stream can wait for a message
    report(body(rank))
    dist.barrier()
    dist.destroy_process_group()


SIZES = (0, 1, 1000, 300_001, 5_000_000)
"""The numbers of elements, which fit one record or need many."""


def numbers(length: int, seed: int, device: str = "cuda") -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed)).to(device)


# ---- what arrives -------------------------------------------------------------------------------


def around_the_ring(rank: int) -> list[str]:
    """Returns the names of messages that did not arrive as they were sent."""
    world, wrong = dist.get_world_size(), []
    right, left = (rank + 1) % world, (rank - 1) % world
    for size in SIZES:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            sent = (numbers(size, rank) * 9).to(dtype)
            got = torch.empty_like(sent)
            works = [dist.isend(sent, right), dist.irecv(got, left)]
            for work in works:
                assert work is not None
                work.wait()
            if not torch.equal(got, (numbers(size, left) * 9).to(dtype)):
                wrong.append(f"{size} {dtype}")
    return wrong


@pytest.mark.parametrize(("ranks", "transport"), [(2, "shm"), (2, "tcp"), (4, "shm"), (4, "tcp")])
def test_messages_of_every_length(ranks: int, transport: str, waiting: dict[str, str]) -> None:
    found = in_group(ranks, around_the_ring, SEALRING_TRANSPORT=transport, **waiting)
    assert found == [[]] * ranks


def test_keys_go_forward_on_the_gpu_too(waiting: dict[str, str]) -> None:
    environment = with_settings(waiting, rekey_bytes=1_000_000)
    assert in_group(2, around_the_ring, **environment) == [[]] * 2


def batched(rank: int) -> bool:
    world = dist.get_world_size()
    right, left = (rank + 1) % world, (rank - 1) % world
    good = True
    for size in SIZES:
        sent, got = numbers(size, rank), torch.empty(size, device="cuda")
        operations = [dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, got, left)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        good &= torch.equal(got, numbers(size, left))
    return good


@pytest.mark.parametrize("ranks", [2, 4])
def test_batch_of_sends_and_receives(ranks: int, waiting: dict[str, str]) -> None:
    assert in_group(ranks, batched, **waiting) == [True] * ranks


def from_anybody(rank: int) -> bool:
    world = dist.get_world_size()
    for tag, size in enumerate((1, 700_001)):
        if rank != 0:
            dist.send(numbers(size, rank), 0, tag=tag)
            continue
        seen = set()
        for _ in range(world - 1):
            got = torch.empty(size, device="cuda")
            source = dist.recv(got, tag=tag)
            if not torch.equal(got, numbers(size, source)):
                return False
            seen.add(source)
        if seen != set(range(1, world)):
            return False
    return True


def test_receive_from_any_source_says_which(waiting: dict[str, str]) -> None:
    assert in_group(4, from_anybody, **waiting) == [True] * 4


def tags_in_any_order(rank: int) -> bool:
    """Messages of the CPU and collectives of the GPU use the same group meanwhile."""
    lengths = {5: 1000, 0: 700_001, 2**31 - 1: 3, 7: 700_001}
    devices = {5: "cuda", 0: "cpu", 2**31 - 1: "cuda", 7: "cuda"}
    total = torch.ones(100_000, device="cuda")
    if rank == 0:
        works = [
            dist.isend(numbers(lengths[tag], tag, devices[tag]), 1, tag=tag) for tag in lengths
        ]
        dist.all_reduce(total)
        for work in works:
            assert work is not None
            work.wait()
        return bool((total == 2).all())
    good = True
    for tag in (7, 2**31 - 1):
        got = torch.empty(lengths[tag], device=devices[tag])
        dist.recv(got, 0, tag=tag)
        good &= torch.equal(got, numbers(lengths[tag], tag, devices[tag]))
    dist.all_reduce(total)
    for tag in (0, 5):
        got = torch.empty(lengths[tag], device=devices[tag])
        dist.recv(got, 0, tag=tag)
        good &= torch.equal(got, numbers(lengths[tag], tag, devices[tag]))
    return good


def test_tags_match_beside_other_traffic(waiting: dict[str, str]) -> None:
    assert in_group(2, tags_in_any_order, **waiting) == [True, True]


def not_in_one_piece(rank: int) -> bool:
    values = numbers(20_000, 1).view(100, 200).t()
    if rank == 0:
        dist.send(values, 1)
        return True
    wide = torch.zeros(200, 200, device="cuda")
    dist.recv(wide[:, ::2], 0)
    return torch.equal(wide[:, ::2], values) and not wide[:, 1::2].any()


def test_tensors_that_are_not_contiguous(waiting: dict[str, str]) -> None:
    assert in_group(2, not_in_one_piece, **waiting) == [True, True]


def no_thread_waits(rank: int) -> bool:
    """Both sides only ask whether the message is done; the group's own thread moves the bytes."""
    got = torch.empty(3_000_001, device="cuda")
    work = dist.isend(numbers(3_000_001, 1), 1) if rank == 0 else dist.irecv(got, 0)
    assert work is not None
    end = time.monotonic() + 60
    while not work.is_completed():
        assert time.monotonic() < end
        time.sleep(0.002)
    return rank == 0 or torch.equal(got, numbers(3_000_001, 1))


def test_messages_move_while_no_thread_waits(waiting: dict[str, str]) -> None:
    assert in_group(2, no_thread_waits, **waiting) == [True, True]


def from_a_thread(rank: int) -> bool:
    """Sends and receives from a thread that has not used the GPU before."""
    sent, got = numbers(100_000, rank), torch.empty(100_000, device="cuda")

    def exchange() -> None:
        work = dist.isend(sent, 1 - rank)
        dist.recv(got, 1 - rank)
        assert work is not None
        work.wait()

    thread = threading.Thread(target=exchange)
    thread.start()
    thread.join()
    return torch.equal(got, numbers(100_000, 1 - rank))


def test_any_thread_may_send(waiting: dict[str, str]) -> None:
    assert in_group(2, from_a_thread, **waiting) == [True, True]


# ---- streams ------------------------------------------------------------------------------------


def after_the_callers_stream(rank: int) -> bool:
    """At both ends a message waits for the earlier work of its stream."""
    side = torch.cuda.Stream()
    good = True
    with torch.cuda.stream(side):
        for turn in range(20):
            data = torch.zeros(3_000_000, device="cuda")
            torch.cuda._sleep(2_000_000)
            data += turn + 1
            if rank == 0:
                dist.send(data, 1)
                continue
            kept = data * 2  # still to be computed when the message comes
            data += 100
            dist.recv(data, 0)
            good &= bool((data == turn + 1).all())
            good &= bool((kept == 2 * (turn + 1)).all())
    return good


def test_streams(waiting: dict[str, str]) -> None:
    assert in_group(2, after_the_callers_stream, **waiting) == [True, True]


def past_a_busy_stream(rank: int) -> bool:
    """A message whose stream is not ready yet does not delay a later message."""
    around_the_ring(rank)  # allocates now what would be allocated later, for which CUDA may wait
    slow, quick = torch.cuda.Stream(), torch.cuda.Stream()
    large, small = torch.zeros(1_000_000, device="cuda"), torch.zeros(1000, device="cuda")
    for tensor in (large, small):
        tensor += 1  # loads the code now too, for which CUDA waits
        tensor -= 1
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    if rank == 0:
        with torch.cuda.stream(slow):
            torch.cuda._sleep(4_000_000_000)
            large += 1
            late = dist.isend(large, 1, tag=1)
        with torch.cuda.stream(quick):
            small += 2
            dist.send(small, 1, tag=2)
        quick.synchronize()
        overtaken = late is not None and not late.is_completed()
        assert late is not None
        late.wait()
        return overtaken
    late = dist.irecv(large, 0, tag=1)
    dist.recv(small, 0, tag=2)
    torch.cuda.current_stream().synchronize()
    overtaken = late is not None and not late.is_completed()
    assert late is not None
    late.wait()
    return overtaken and bool((small == 2).all()) and bool((large == 1).all())


def test_a_busy_stream_holds_up_no_other_message(waiting: dict[str, str]) -> None:
    assert in_group(2, past_a_busy_stream, **waiting) == [True, True]


# ---- what goes wrong ----------------------------------------------------------------------------


def with_mixed_devices(rank: int, report: Report, on_gpu: int) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("sealring")
    tensor = torch.ones(100_000, device="cuda" if rank == on_gpu else "cpu")
    try:
        if rank == 0:
            dist.send(tensor, 1)
            dist.recv(torch.ones(1), 1)
        else:
            dist.recv(tensor, 0)
    except OutOfStep as error:
        report(str(error))


@pytest.mark.parametrize("on_gpu", [0, 1])
def test_a_mixed_pair_is_told_so(on_gpu: int) -> None:
    errors = dict(run_workers(2, with_mixed_devices, on_gpu))
    assert sorted(errors) == [0, 1]
    places = {0: "the CPU", 1: "the CPU", on_gpu: "a GPU"}
    for text in errors.values():
        assert f"rank 0 has its tensor on {places[0]}, rank 1 on {places[1]}" in text


def left_alone(rank: int, report: Report) -> None:
    """A message is under way when the group ends; then its memory belongs to the caller again."""
    torch.cuda.set_device(0)
    dist.init_process_group("sealring")
    data = torch.ones(1000, device="cuda")
    work = dist.irecv(data, 1 - rank)
    assert work is not None
    dist.destroy_process_group()
    try:
        work.wait()
    except (GroupClosed, PeerLost):  # the first rank to leave is lost to the other
        data += 1
        report(bool((data == 2).all()))


def test_a_group_that_ends_gives_the_memory_back() -> None:
    assert dict(run_workers(2, left_alone)) == {0: True, 1: True}
