"""Calls that are like an earlier one, and calls that only look so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from sealring.errors import GroupClosed, PeerLost, Unsupported
from sealring.group.work import FinishedWork
from tests.workers import Workers


def options() -> Any:
    opts = dist.AllreduceOptions()
    opts.asyncOp = False
    return opts


def repeats(rank: int, world: int) -> None:
    group: Any = dist.group.WORLD
    before = group.account()["sealed_bytes"]
    for turn in range(30):
        length = 100 + turn % 3  # other tensors at other addresses, of three lengths in turn
        tensor = torch.full((length,), float(rank + turn))
        work = group.allreduce([tensor], options())
        assert isinstance(work, FinishedWork) == (turn >= 3)
        assert work.wait()
        assert work.is_success()
        assert work.result()[0] is tensor
        assert work.get_future().wait()[0] is tensor
        assert tensor.tolist() == [world * turn + sum(range(world))] * length
    assert group.account()["sealed_bytes"] > before
    assert group.recorder.collective(30).state == "done"


def test_calls_like_an_earlier_one_have_their_own_results(workers: Workers) -> None:
    workers.run(repeats, world=3)


def look_alike(rank: int, world: int) -> None:
    dist.all_reduce(torch.ones(8))
    for op, want in ((dist.ReduceOp.MAX, 2.0), (dist.ReduceOp.PRODUCT, 2.0)):
        tensor = torch.full((8,), float(rank + 1))
        dist.all_reduce(tensor, op=op)
        assert tensor.tolist() == [want] * 8
    for _ in range(2):  # each has a factor of its own
        for factor in (2.0, 5.0):
            tensor = torch.ones(8)
            dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(factor))
            assert tensor.tolist() == [world * factor] * 8
    strided = torch.ones(16)[::2]
    dist.all_reduce(strided)
    assert strided.tolist() == [float(world)] * 8
    integers = torch.ones(8, dtype=torch.int32)
    dist.all_reduce(integers)
    assert integers.tolist() == [world] * 8
    sparse = torch.ones(8).to_sparse()
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [float(world)] * 8
    cut = torch.ones(8)
    cut.untyped_storage().resize_(8)
    with pytest.raises(Unsupported, match="storage has 8"):
        dist.all_reduce(cut)
    under_way = torch.ones(8)
    work = dist.all_reduce(under_way, async_op=True)
    assert not isinstance(work, FinishedWork)
    after = torch.ones(8)
    dist.all_reduce(after)
    work.wait()
    assert under_way.tolist() == after.tolist() == [float(world)] * 8


def test_calls_that_only_look_alike_are_made_anew(workers: Workers) -> None:
    workers.run(look_alike, world=2)


def callback_calls(rank: int, world: int) -> None:
    dist.all_reduce(torch.ones(8))
    inner = torch.ones(8)
    work = dist.all_reduce(torch.ones(8), async_op=True)
    assert work is not None
    done = work.get_future().then(lambda _: dist.all_reduce(inner))
    done.wait()
    assert inner.tolist() == [float(world)] * 8


def test_a_callback_may_repeat_a_call(workers: Workers) -> None:
    workers.run(callback_calls, world=2)


def fails(rank: int, world: int) -> None:
    group: Any = dist.group.WORLD
    for _ in range(2):
        dist.all_reduce(torch.ones(8))
    if rank == 1:
        dist.destroy_process_group()
        return
    with pytest.raises(PeerLost) as lost:
        dist.all_reduce(torch.ones(8))
    assert lost.value.peer == 1
    assert group.recorder.state == "failed"
    with pytest.raises(PeerLost):
        dist.all_reduce(torch.ones(8))
    group.shutdown()
    with pytest.raises(GroupClosed):
        group.allreduce([torch.ones(8)], options())


def test_an_error_is_that_of_the_group(workers: Workers) -> None:
    workers.run(fails, world=2)
