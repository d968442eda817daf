"""Calls that are like an earlier one, and calls that only look so."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sealring.core.group.work import FinishedWork
from sealring.errors import GroupClosed, GroupError, PeerLost, Unsupported
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


def given_other_memory(rank: int, world: int) -> None:
    for _ in range(2):
        dist.all_reduce(torch.ones(1000))
    barrier = dist.distributed_c10d._get_default_store()
    tensor = torch.ones(1000)
    if rank == 1:
        barrier.wait(["replaced"])
        dist.all_reduce(tensor)
        return
    storage = weakref.ref(tensor.untyped_storage())
    alive = []

    def replace() -> None:
        while dist.group.WORLD.dispatcher.idle:  # type: ignore[union-attr]
            time.sleep(0.01)
        tensor.data = torch.zeros(1000)
        alive.append(storage() is not None)
        barrier.set("replaced", "")

    thread = threading.Thread(target=replace)
    thread.start()
    dist.all_reduce(tensor)
    thread.join()
    assert alive == [True]
    gc.collect()
    assert storage() is None
    assert tensor.eq(0).all()


def test_memory_lives_until_the_call_has_ended(workers: Workers) -> None:
    """Another thread gives the tensor other memory while the call waits for its peers."""
    # A group of its own: that of the test before was closed.
    workers.run(given_other_memory, world=2, env={"CASE": "memory"})


class Interrupting:
    """A lock; when it has been taken by acquire(), or given back by `with`, comes Ctrl-C."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.release = lock.release

    def acquire(self) -> bool:
        taken: bool = self._lock.acquire()
        signal.raise_signal(signal.SIGINT)
        return taken

    def __enter__(self) -> None:
        self._lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(*error)
        signal.raise_signal(signal.SIGINT)


def twice(length: int) -> None:
    for _ in range(2):
        dist.all_reduce(torch.ones(length))


def interrupted_in_between(rank: int, world: int, name: str, length: int) -> None:
    group: Any = dist.group.WORLD
    dispatcher = group.dispatcher
    dist.all_reduce(torch.ones(8))
    if rank == 0:
        lock = getattr(dispatcher, name)
        setattr(dispatcher, name, Interrupting(lock))
        call = group.allreduce
        with pytest.raises(KeyboardInterrupt):
            call([torch.ones(length)], options()).wait()
        setattr(dispatcher, name, lock)
        assert not dispatcher.turn.locked()
        assert not dispatcher.submitting.locked()
        dist.destroy_process_group()
    else:
        with pytest.raises(GroupError) as told:
            twice(length)  # the first may have been done when the interrupt came
        assert told.value.peer in (0, None)


@pytest.mark.parametrize("length", [8, 9], ids=["prepared", "new"])
@pytest.mark.parametrize("name", ["turn", "submitting"])
def test_an_interrupt_between_two_lines_leaves_no_lock_taken(
    workers: Workers, name: str, length: int
) -> None:
    env = {"CASE": f"interrupt {name} {length}"}
    workers.run(interrupted_in_between, name, length, world=2, env=env)


def interrupted_before_the_core(rank: int, world: int, again: bool) -> None:
    group: Any = dist.group.WORLD
    dist.all_reduce(torch.ones(8))
    if rank == 0:

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        group.recorder.started = interrupt
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(torch.ones(8 if again else 9))
        del group.recorder.started
    with pytest.raises(GroupClosed) as told:
        dist.all_reduce(torch.ones(8 if again else 9))
    assert told.value.reported_by == (None if rank == 0 else 0)
    dist.destroy_process_group()


@pytest.mark.parametrize("again", [True, False], ids=["prepared", "new"])
def test_an_interrupt_before_the_core_runs_is_told_to_the_others(
    workers: Workers, again: bool
) -> None:
    """They wait in the call that this rank has begun."""
    env = {"CASE": f"before the core {again}"}
    workers.run(interrupted_before_the_core, again, world=2, env=env)
