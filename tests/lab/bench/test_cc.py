"""The emulated GPU-TEE path really sums and seals, and notices changed bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from sealring.errors import WorkerFailed
from sealring.lab.bench.cc import CcRing, make_ring
from tests.workers import Workers

KEYS = [bytes([at]) * 32 for at in range(1, 5)]


def summed(rank: int, world: int, lengths: list[int]) -> None:
    gloo = dist.new_group(backend="gloo")
    ring = make_ring(gloo, copy_us=0)
    for length in lengths:
        for dtype in (torch.float32, torch.bfloat16):
            tensor = (torch.arange(length) % 7 + rank).to(dtype)
            ring.all_reduce(tensor)
            expected = sum(torch.arange(length) % 7 + each for each in range(world))
            assert torch.equal(tensor, expected.to(dtype)), (length, dtype)  # type: ignore[union-attr]
    assert ring.all_reduces == 2 * len(lengths)
    assert all(ring.spent_s[part] > 0 for part in ("seal", "transfer", "open", "reduce"))


@pytest.mark.parametrize("world", [2, 3])
def test_it_sums_whatever_the_length(workers: Workers, world: int) -> None:
    workers.run(summed, [1, 2, 3, 1000, 4097], world=world)


def with_other_keys(rank: int, world: int) -> str:
    gloo = dist.new_group(backend="gloo")
    # Rank 1 opens with another key, as if every byte had been changed on the way.
    keys = KEYS[:2] if rank == 0 else [KEYS[3], KEYS[1]]
    ring = CcRing(gloo, keys, copy_us=0)
    try:
        ring.exchange(torch.ones(8), 32)
    except WorkerFailed as error:
        return str(error)
    return "opened"


def test_what_was_not_sealed_by_its_sender_is_refused(workers: Workers) -> None:
    assert workers.run(with_other_keys, world=2) == [
        "opened",
        "the emulated path received what its sender did not send",
    ]


def averaged(rank: int, world: int) -> float:
    from torch.nn.parallel import DistributedDataParallel

    gloo = dist.new_group(backend="gloo")
    ring = make_ring(gloo, copy_us=0)
    model = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    wrapped = DistributedDataParallel(model, process_group=gloo)
    hook: Any = lambda ring, bucket: ring.average(bucket)  # noqa: E731
    wrapped.register_comm_hook(ring, hook)
    wrapped(torch.full((1, 3), float(rank))).sum().backward()
    assert model.weight.grad is not None
    return float(model.weight.grad[0, 0])


def test_as_ddps_hook_it_gives_the_mean(workers: Workers) -> None:
    assert workers.run(averaged, world=2) == [0.5, 0.5]
