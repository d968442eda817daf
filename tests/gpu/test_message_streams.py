"""Streams wait for messages while the host goes on; test_streams.py covers the collectives."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from tests.gpu.test_streams import (
    MILLION,
    in_group,
    memory_given_back,
    more_launches_than_a_queue_holds,
)


def the_stream_waits(rank: int) -> bool:
    """Rank 1 sends only after rank 0's calls on a separate stream have returned."""
    store, side = _get_default_store(), torch.cuda.Stream()
    data = torch.full((20 * MILLION,), rank + 1.0, device="cuda")
    torch.cuda.synchronize()
    if rank:
        store.wait(["rank 0 went on"])
        dist.send(data, 0)
        dist.recv(data, 0)
        return bool((data == 4).all())
    with torch.cuda.stream(side):
        dist.recv(data, 1)
        data *= 2
        over = side.record_event()
        dist.send(data, 1)
    went_on = not over.query()
    store.set("rank 0 went on", "")
    side.synchronize()
    return went_on and bool((data == 4).all())


def test_the_host_goes_on_and_the_stream_waits() -> None:
    assert in_group(2, the_stream_waits) == [True, True]


def there_and_back(rank: int) -> bool:
    """Each turn waits for the one before only on the GPU; the host is far ahead."""
    peer = 1 - rank
    data = torch.zeros(300_000, device="cuda")
    for _ in range(100):
        if rank == 0:
            data += 1
            dist.send(data, peer)
            dist.recv(data, peer)
        else:
            dist.recv(data, peer)
            data += 1
            dist.send(data, peer)
    return bool((data == 200).all())


def test_a_long_way_ahead() -> None:
    assert in_group(2, there_and_back) == [True, True]


def freed_early(rank: int) -> bool:
    """Memory that the script frees is not reused while it is still being sent or written."""
    right = []
    for turn in range(30):
        data = torch.full((2 * MILLION,), float(turn), device="cuda")
        torch.cuda._sleep(2_000_000)
        work: Any
        if rank == 0:
            work = dist.isend(data, 1)
        else:
            data.zero_()
            work = dist.irecv(data, 0)
        if turn % 2 or rank:
            work.wait()
            right.append((data == turn).all())
        del data, work
        torch.empty(2 * MILLION, device="cuda").fill_(-1)
    return all(bool(each) for each in right)


def test_tensors_freed_early() -> None:
    assert in_group(2, freed_early) == [True, True]


def while_the_stream_waits(rank: int, act: Callable[[], None]) -> float:
    data = torch.ones(20 * MILLION, device="cuda")
    torch.empty(100 * MILLION, device="cuda")  # freed at once, so that there is memory to give back
    torch.cuda.synchronize()
    if rank:
        time.sleep(3)
        dist.send(data + 1, 0)
    else:
        dist.recv(data, 1)
        act()
    return float(data[-1]) + rank


def while_launching(rank: int) -> float:
    return while_the_stream_waits(rank, more_launches_than_a_queue_holds)


def while_freeing(rank: int) -> float:
    return while_the_stream_waits(rank, memory_given_back)


@pytest.mark.parametrize("body", [while_launching, while_freeing])
def test_the_driver_can_be_used_while_a_stream_waits(body: Callable[..., Any]) -> None:
    assert in_group(2, body) == [2.0, 2.0]


def beside_collectives(rank: int) -> float:
    """A message and a collective are under way at once, each held by its own stream."""
    sides = [torch.cuda.Stream() for _ in range(2)]
    total = 0.0
    for turn in range(10):
        data = torch.full((3 * MILLION,), 1.0, device="cuda")
        mail = torch.full((3 * MILLION,), float(turn + rank), device="cuda")
        for side in sides:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(sides[0]):
            dist.all_reduce(data)
        with torch.cuda.stream(sides[1]):
            dist.send(mail, 1) if rank == 0 else dist.recv(mail, 0)
        for side in sides:
            side.synchronize()
        total += float(data.sum() / data.numel()) + float(mail[-1]) - turn
    return total


def test_messages_beside_collectives() -> None:
    assert in_group(2, beside_collectives) == [20.0, 20.0]


def from_stage_to_stage(rank: int) -> bool:
    """A pipeline of four: every stage works on what it received, and each host is far ahead."""
    world, batches = dist.get_world_size(), 20
    weight = torch.full((512, 512), 1.0 / 512, device="cuda")
    outcomes, sends = [], []
    for batch in range(batches):
        data = torch.full((512, 512), float(batch), device="cuda")
        if rank:
            dist.recv(data, rank - 1)
        data = data @ weight + 1
        if rank + 1 < world:
            sends.append(dist.isend(data, rank + 1))
        else:
            outcomes.append(data)
    for sent in sends:
        assert sent is not None
        sent.wait()
    expected = [batch + world for batch in range(len(outcomes))]
    return all(
        bool(torch.isclose(found, torch.full_like(found, value), rtol=1e-3).all())
        for found, value in zip(outcomes, expected, strict=True)
    )


def test_a_pipeline_of_four() -> None:
    assert in_group(4, from_stage_to_stage) == [True] * 4
