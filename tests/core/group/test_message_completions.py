"""Messages that only a stream waits for: the host goes on, as with collectives."""

from __future__ import annotations

import ctypes
import gc
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from sealring.core.engine.streams import driver_calls
from sealring.errors import GroupClosed, GroupError, OutOfStep, PeerLost
from tests.core.engine.host_streams import PATIENCE_S
from tests.core.group.host_streams import taken_for_a_gpu
from tests.core.group.test_completions import with_a_group
from tests.workers import Workers


def meet() -> None:
    """Waits for all ranks through the store, without a message or collective of the group."""
    store: Any = _get_default_store()
    if store.add("met", 1) == dist.get_world_size():
        store.set("all met", "")
    store.wait(["all met"])


# ---- the host goes on ---------------------------------------------------------------------------


def received(rank: int, world: int) -> list[float]:
    """Only streams wait for the messages, in another order than they were sent."""
    calls, store = taken_for_a_gpu(), _get_default_store()
    sizes = [1, 300_000, 0, 70_000, 5]
    if rank == 1:
        store.wait(["rank 0 went on"])
        works = [
            dist.isend(torch.full((size,), float(tag)), 0, tag=tag)
            for tag, size in reversed(list(enumerate(sizes)))
        ]
        for work in works:
            assert work is not None
            work.wait()
        dist.destroy_process_group()  # what streams wait for is sent first
        return []
    got = [torch.full((size,), -1.0) for size in sizes]
    for tag, tensor in enumerate(got):
        dist.recv(tensor, 1, tag=tag)
    seen = calls.streams.put(lambda: [tensor.sum().item() for tensor in got])
    assert not seen.done()
    assert not driver_calls.any
    store.set("rank 0 went on", "")
    sums: list[float] = seen.result(PATIENCE_S)
    dist.destroy_process_group()
    return sums


def test_the_host_goes_on_and_the_stream_waits(workers: Workers) -> None:
    found = workers.run(with_a_group, received, group=False)
    assert found == [[0.0, 300_000.0, 0.0, 210_000.0, 20.0], []]


def test_a_peer_that_leaves(workers: Workers) -> None:
    assert workers.run(with_a_group, left_alone, group=False) == [None, None]


def left_alone(rank: int, world: int) -> None:
    calls = taken_for_a_gpu()
    if rank == 1:
        meet()
        dist.destroy_process_group()
        return
    data = torch.ones(70_000)
    work = dist.irecv(data, 1)
    assert work is not None
    work.wait()
    seen = calls.streams.put(data.clone)
    meet()
    assert seen.result(PATIENCE_S).isnan().all()
    with pytest.raises(PeerLost):
        work.wait()
    dist.destroy_process_group()


def strided(rank: int, world: int) -> list[list[float]]:
    """The host waits for a result that must be copied: by every way to ask, done means copied."""
    taken_for_a_gpu()
    found = []
    for ask in ("wait", "poll", "future", "batch"):
        if rank == 1:
            dist.send(torch.arange(6.0).reshape(3, 2).t(), 0)
            continue
        data = torch.zeros(3, 2)
        if ask == "batch":
            (work,) = dist.batch_isend_irecv([dist.P2POp(dist.irecv, data.t(), 1)])
            work.wait()
        else:
            only = dist.irecv(data.t(), 1)
            assert only is not None
            if ask == "poll":
                while not only.is_completed():
                    time.sleep(1e-3)
            elif ask == "future":
                only.get_future().wait()
            else:
                only.wait()
        found.append(data.flatten().tolist())
    dist.destroy_process_group()
    return found


def test_what_is_copied_is_there_when_it_is_done(workers: Workers) -> None:
    values, _ = workers.run(with_a_group, strided, group=False)
    assert values == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 4


def mixed_batches(rank: int, world: int) -> list[float]:
    """Messages that streams can wait for beside one that they cannot."""
    calls, peer = taken_for_a_gpu(), 1 - rank
    found = []
    for turn in range(5):
        got = [torch.zeros(4, 3), torch.zeros(1000)]
        sent = [torch.full((3, 4), turn + 1.0), torch.full((1000,), turn + 2.0)]
        operations = [
            dist.P2POp(dist.irecv, got[0].t(), peer, tag=1),
            dist.P2POp(dist.irecv, got[1], peer, tag=2),
            dist.P2POp(dist.isend, sent[0], peer, tag=1),
            dist.P2POp(dist.isend, sent[1], peer, tag=2),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        seen = calls.streams.put(lambda got=got: got[0].sum().item() + got[1][-1].item())
        found.append(seen.result(PATIENCE_S))
    dist.destroy_process_group()
    return found


def test_batches_of_both_kinds(workers: Workers) -> None:
    expected = [12.0 * (turn + 1) + turn + 2 for turn in range(5)]
    assert workers.run(with_a_group, mixed_batches, group=False) == [expected] * 2


def hold_the_interpreter(seconds: float) -> None:
    """Holds it as a destructor that waits inside CUDA does."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def while_python_stands_still(rank: int, world: int) -> bool:
    """Messages go on while no thread gets the interpreter."""
    taken_for_a_gpu()
    if rank == 1:
        dist.barrier()
        for tag in range(6):
            dist.send(torch.full((5000,), float(tag)), 0, tag=tag)
        dist.destroy_process_group()
        return True
    got = [torch.zeros(5000) for _ in range(6)]
    works = [dist.irecv(tensor, 1, tag=tag) for tag, tensor in enumerate(got)]
    for work in works:
        assert work is not None
        work.wait()
    dist.barrier()
    hold_the_interpreter(3.0)
    arrived = [bool((tensor == tag).all()) for tag, tensor in enumerate(got)]
    dist.destroy_process_group()
    return all(arrived)


def test_messages_need_no_interpreter(workers: Workers) -> None:
    assert workers.run(with_a_group, while_python_stands_still, group=False) == [True, True]


def interrupted(rank: int, world: int) -> None:
    """Ctrl-C in a call whose message may be under way: the group ends, the memory is kept."""
    taken_for_a_gpu()
    group: Any = dist.group.WORLD
    if rank == 0:
        mailbox, data = group.messages.mailbox, torch.ones(100)
        submit = mailbox.submit

        def interrupts(*arguments: Any) -> None:
            submit(*arguments)
            raise KeyboardInterrupt

        mailbox.submit = interrupts
        with pytest.raises(KeyboardInterrupt):
            dist.recv(data, 1)
        with pytest.raises(GroupClosed):
            dist.send(data, 1)
        assert [work.kept[0] is data for work in group.messages.abandoned] == [True]
    else:

        def receive() -> None:
            work = dist.irecv(torch.ones(1), 0)
            assert work is not None
            work.wait(timedelta(seconds=PATIENCE_S))

        with pytest.raises(GroupClosed):  # the other end may be gone before the call, or after it
            receive()
    dist.destroy_process_group()


def test_an_interrupt_while_a_message_is_posted(workers: Workers) -> None:
    workers.run(with_a_group, interrupted, group=False)


def in_batches(rank: int, world: int) -> list[float]:
    calls, peer = taken_for_a_gpu(), 1 - rank
    seen = []
    for turn in range(10):
        sent = [torch.full((1000 * size,), turn + rank + 0.5 * size) for size in (1, 90)]
        got = [torch.zeros_like(tensor) for tensor in sent]
        operations = [dist.P2POp(dist.irecv, tensor, peer, tag=n) for n, tensor in enumerate(got)]
        operations += [dist.P2POp(dist.isend, tensor, peer, tag=n) for n, tensor in enumerate(sent)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        seen.append(calls.streams.put(lambda got=got: sum(each[-1].item() for each in got)))
    sums = [each.result(PATIENCE_S) for each in seen]
    dist.destroy_process_group()
    return sums


def test_batches(workers: Workers) -> None:
    found = workers.run(with_a_group, in_batches, group=False)
    assert found == [[2.0 * (turn + 1 - rank) + 45.5 for turn in range(10)] for rank in (0, 1)]


def tensors_go(rank: int, world: int) -> bool:
    """The script drops the tensor it sends; it is kept for as long as the message needs it."""
    calls, peer = taken_for_a_gpu(), 1 - rank
    sent = torch.full((200_000,), 1.0 + rank)
    kept = weakref.ref(sent.untyped_storage())
    got = torch.zeros(200_000)
    dist.send(sent, peer) if rank == 0 else dist.recv(got, peer)
    del sent
    dist.recv(got, peer) if rank == 0 else dist.send(torch.full((200_000,), 2.0), peer)
    seen = calls.streams.put(lambda: bool((got == 2.0 - rank).all()))
    good: bool = seen.result(PATIENCE_S)
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    return good and kept() is None


def test_tensors_are_kept_until_they_are_sent(workers: Workers) -> None:
    assert workers.run(with_a_group, tensors_go, group=False) == [True, True]


# ---- where the host waits -----------------------------------------------------------------------


def from_anybody(rank: int, world: int) -> int:
    taken_for_a_gpu()
    if rank == 1:
        dist.send(torch.full((5000,), 7.0), 0)
        dist.destroy_process_group()
        return 1
    data = torch.zeros(5000)
    source = dist.recv(data)
    assert (data == 7).all()
    dist.destroy_process_group()
    return source


def test_from_anybody_the_host_waits_to_say_from_whom(workers: Workers) -> None:
    assert workers.run(with_a_group, from_anybody, group=False) == [1, 1]


def beside_a_call_that_needs_the_driver(rank: int, world: int) -> bool:
    taken_for_a_gpu()
    driver_calls.begin()
    data = torch.full((5000,), 7.0 * rank)
    dist.send(data, 0) if rank else dist.recv(data, 1)
    driver_calls.end()
    good = bool((data == 7).all())
    assert not driver_calls.any
    dist.destroy_process_group()
    return good


def test_beside_a_call_that_needs_the_driver_the_host_waits(workers: Workers) -> None:
    found = workers.run(with_a_group, beside_a_call_that_needs_the_driver, group=False)
    assert found == [True, True]


# ---- what fails ---------------------------------------------------------------------------------


def disagree(rank: int) -> tuple[Any, torch.Tensor, Any]:
    """Streams wait for a message on both ranks, and then the two ends of one differ in length."""
    calls = taken_for_a_gpu()
    data = torch.ones(1000)
    work: Any = dist.irecv(data, 1 - rank)
    work.wait()
    seen = calls.streams.put(data.clone)
    meet()
    if rank == 1:
        dist.isend(torch.ones(1001), 0)
    return calls, seen.result(PATIENCE_S), work


def told_by_the_next_message(rank: int, world: int) -> None:
    _, seen, _ = disagree(rank)
    assert seen.isnan().all()
    for _ in range(2):
        with pytest.raises(OutOfStep):
            dist.send(torch.ones(10), 1 - rank)
    dist.destroy_process_group()


def told_by_the_next_collective(rank: int, world: int) -> None:
    disagree(rank)
    with pytest.raises(OutOfStep):
        dist.all_reduce(torch.ones(10))
    dist.destroy_process_group()


def told_by_the_work(rank: int, world: int) -> None:
    _, _, work = disagree(rank)
    for timeout in (timedelta(seconds=PATIENCE_S), timedelta(0)):
        with pytest.raises(OutOfStep):
            work.wait(timeout)
    assert work.is_completed()
    assert not work.is_success()
    dist.destroy_process_group()


def told_at_the_end(rank: int, world: int) -> None:
    disagree(rank)
    with pytest.raises(OutOfStep):
        dist.destroy_process_group()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "by",
    [told_by_the_next_message, told_by_the_next_collective, told_by_the_work, told_at_the_end],
)
@pytest.mark.threat("C4")
def test_an_error_that_comes_late_is_told(workers: Workers, by: Any) -> None:
    workers.run(with_a_group, by, group=False)


def a_failed_collective(rank: int, world: int) -> None:
    """A failure that ends the group's collectives also ends its messages and all waits for them."""
    calls = taken_for_a_gpu()
    data = torch.ones(3000)
    dist.recv(data, 1 - rank)
    seen = calls.streams.put(data.clone)
    with calls.on_cpu(), pytest.raises(OutOfStep):
        dist.all_reduce(torch.ones(10 + rank))
    assert seen.result(PATIENCE_S).isnan().all()
    with pytest.raises(GroupError):
        dist.send(data, 1 - rank)
    dist.destroy_process_group()


def test_a_failed_collective_lets_streams_go_on(workers: Workers) -> None:
    workers.run(with_a_group, a_failed_collective, group=False)


def aborted(rank: int, world: int) -> None:
    calls = taken_for_a_gpu()
    data = torch.ones(3000)
    dist.recv(data, 1 - rank)
    seen = calls.streams.put(data.clone)
    meet()
    group: Any = dist.group.WORLD
    group.abort()
    assert seen.result(PATIENCE_S).isnan().all()


def test_an_aborted_group_lets_streams_go_on(workers: Workers) -> None:
    workers.run(with_a_group, aborted, group=False)
