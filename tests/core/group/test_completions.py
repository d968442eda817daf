"""Calls that only a stream waits for: the host goes on, and errors are still reported."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager, _get_default_store

from sealring import _native
from sealring.core.engine.collective import DType, ReduceKind
from sealring.core.engine.engine import CollectiveEngine
from sealring.core.engine.streams import StreamCaller, StreamWait, driver_calls
from sealring.core.group.deferred_errors import DeferredError, raise_deferred_errors
from sealring.core.group.work import SealedWork
from sealring.core.schedule import Algorithm, Operation
from sealring.errors import GroupClosed, OutOfStep, PeerSilent, Unsupported
from tests.core.engine.cases import Case, tensors_of
from tests.core.engine.host_streams import PATIENCE_S, HostStreams, put
from tests.core.engine.stand_ins import attach_host_driver
from tests.core.group.host_streams import taken_for_a_gpu
from tests.workers import SECRET, Workers


def with_a_group(rank: int, world: int, body: Any) -> Any:
    """Runs `body` in a new group: a group is given streams once, and most of these groups fail."""
    dist.init_process_group("sealring")
    return body(rank, world)


# ---- the host goes on ---------------------------------------------------------------------------


def only_the_stream_waits(rank: int, world: int) -> list[float]:
    """Rank 1 makes its calls only after rank 0's calls have returned."""
    calls, store = taken_for_a_gpu(), _get_default_store()
    one, two = torch.full((3000,), rank + 1.0), torch.full((10, 20), 10.0)
    if rank:
        store.wait(["rank 0 went on"])
    dist.all_reduce(one)  # synchronous, as a script has it
    work = dist.all_reduce(two.t(), async_op=True)
    if rank == 0:
        assert not work.is_completed()
    work.block_current_stream()
    seen = calls.streams.put(lambda: [one[-1].item(), two[-1, -1].item()])
    if rank == 0:
        assert not seen.done()
        store.set("rank 0 went on", "")
    values: list[float] = seen.result(PATIENCE_S)
    assert work.wait(timedelta(seconds=PATIENCE_S))
    assert work.is_success()
    return values


@pytest.mark.threat("C15")
def test_the_host_goes_on_and_the_stream_waits(workers: Workers) -> None:
    assert workers.run(with_a_group, only_the_stream_waits, group=False) == [[3.0, 20.0]] * 2


def called_beside_a_callback(rank: int, world: int) -> tuple[Any, ...]:
    """A future of a CPU call calls a collective of the GPU; the script calls one meanwhile."""
    calls, store = taken_for_a_gpu(), _get_default_store()
    first, inner, later = (torch.full((3000,), value) for value in (1.0, 10.0, 100.0))
    if rank:
        store.wait(["rank 0 has called both"])
    with calls.on_cpu():
        future = dist.all_reduce(first, async_op=True).get_future()

    def call_another(done: Any) -> None:
        dist.all_reduce(inner, async_op=True).wait()

    called = future.then(call_another)
    work = dist.all_reduce(later, async_op=True)
    launched_ahead = rank == 0 and work.get_future().done()
    if rank == 0:
        store.set("rank 0 has called both", "")
    called.wait()
    work.wait()
    # Rank 1's future may have been done already: then only its stream waits for the calls.
    seen = calls.streams.put(lambda: (inner[0].item(), later[0].item())).result(PATIENCE_S)
    return launched_ahead, *seen


def test_nothing_is_launched_ahead_of_a_futures_callback(workers: Workers) -> None:
    """On all ranks the callback's collective runs first, even if the script called others
    meanwhile."""
    found = workers.run(with_a_group, called_beside_a_callback, group=False)
    assert found == [(False, 20.0, 200.0)] * 2


def a_capture_is_refused(rank: int, world: int) -> tuple[list[str], float]:
    """Nothing of the calls is queued: the ranks stay in step, and the next call is right."""
    calls = taken_for_a_gpu()
    data = torch.full((3000,), rank + 1.0)
    refused = []
    calls.capturing = True
    for call in (
        lambda: dist.all_reduce(data),
        lambda: dist.broadcast(data, 0),
        lambda: dist.isend(data, 1 - rank),
        lambda: dist.irecv(data, 1 - rank),
    ):
        with pytest.raises(Unsupported, match="cannot be part of a CUDA graph") as caught:
            call()
        refused.append(str(caught.value).split()[0])
    calls.capturing = False
    dist.all_reduce(data)
    return refused, calls.streams.put(lambda: data[0].item()).result(PATIENCE_S)


@pytest.mark.threat("C17")
def test_a_call_from_a_captured_stream_is_refused_before_it_is_queued(workers: Workers) -> None:
    refused = ["all_reduce", "broadcast", "send", "recv"]
    found = workers.run(with_a_group, a_capture_is_refused, group=False)
    assert found == [(refused, 3.0)] * 2


def futures_that_are_done(rank: int, world: int) -> tuple[float, float]:
    calls, store = taken_for_a_gpu(), _get_default_store()
    data = torch.full((3000,), rank + 1.0)
    if rank:
        store.wait(["rank 0 has a future"])
    future = dist.all_reduce(data, async_op=True).get_future()
    assert future.done()
    # As a communication hook does: its callback runs at once, its work waits in the stream.
    held = future.then(lambda done: done.wait())
    behind = put(calls.streams.side, lambda: data[0].item())
    if rank == 0:
        assert not behind.done()
        store.set("rank 0 has a future", "")
    seen = behind.result(PATIENCE_S)
    return seen, held.wait()[0][-1].item()


def test_a_future_is_done_at_once_and_its_value_when_its_stream_comes_to_it(
    workers: Workers,
) -> None:
    assert workers.run(with_a_group, futures_that_are_done, group=False) == [(3.0, 3.0)] * 2


def several_at_once(rank: int, world: int) -> list[float]:
    calls = taken_for_a_gpu()
    tensors = [torch.full((500 + n,), float(n)) for n in range(6)]
    with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for tensor in tensors[:3]:
            dist.all_reduce(tensor)
    manager.wait()
    group: Any = dist.group.WORLD
    group.allreduce_coalesced(tensors[3:]).wait()
    seen = calls.streams.put(lambda: [tensor[-1].item() for tensor in tensors])
    values: list[float] = seen.result(PATIENCE_S)
    return values


def test_several_at_once_have_one_completion(workers: Workers) -> None:
    assert (
        workers.run(with_a_group, several_at_once, group=False)
        == [[0.0, 2.0, 4.0, 6.0, 8.0, 10.0]] * 2
    )


SUM = Case(Operation.ALL_REDUCE, Algorithm.RING, 8, DType.FLOAT32, ReduceKind.SUM)


class Alone:
    """A world of one rank, whose collectives nothing runs before the test does."""

    def __init__(self) -> None:
        key = _native.Secret.random(32)
        self.engine = CollectiveEngine(0, 1, context=bytes(32), group_key=key, links=[])
        attach_host_driver(self.engine._native, prelaunch=True)
        self.streams = HostStreams()
        self._launched: list[Any] = []

    def submit(self) -> SealedWork:
        (tensors,) = tensors_of(SUM, 1)
        collective, stream = replace(tensors.collective(), ready=0), StreamCaller(self.streams)
        work = SealedWork([], self.engine.interrupt)

        def queue(launched: _native.Completion) -> None:
            assert launched.streams_wait
            work.complete_on_stream(StreamWait(self.streams, launched, in_order=True))
            self._launched.append((collective, launched, work, tensors))

        self.engine.submit_ahead(collective, stream, queue)
        return work

    def run(self) -> None:
        for number, (collective, launched, work, _) in enumerate(self._launched, 1):
            self.engine.run(number, collective, PATIENCE_S, launched)
            work.finish()
        self.engine.close()


def test_the_last_completion_stands_for_all_of_one_group() -> None:
    group, other = Alone(), Alone()
    works = [group.submit() for _ in range(3)]
    stranger = other.submit()

    def combined(*each: SealedWork) -> SealedWork:
        return SealedWork.of_all(each, group.engine.interrupt)

    all_of_them, both = combined(*works), combined(works[0], stranger)
    assert not combined(works[0], SealedWork([], group.engine.interrupt)).completes_on_stream
    assert not combined().completes_on_stream
    both.wait()
    all_of_them.wait()
    assert [each.awaited_by_stream for each in works] == [True, False, True]
    first, second = (each.streams.put(lambda: None) for each in (group, other))
    group.run()
    first.result(PATIENCE_S)
    assert all(each.is_completed() for each in (*works, all_of_them))
    assert not both.is_completed()
    assert not second.done()
    other.run()
    second.result(PATIENCE_S)
    assert both.is_completed()


# ---- what fails ---------------------------------------------------------------------------------


def disagree(rank: int) -> tuple[Any, torch.Tensor, Any]:
    """An all_reduce that fails on all ranks, when its stream has already been told to wait."""
    calls = taken_for_a_gpu()
    data = torch.ones(1000 + rank)
    work = dist.all_reduce(data, async_op=True)
    work.wait()
    seen = calls.streams.put(data.clone)
    return calls, seen.result(PATIENCE_S), work


def told_by_the_next_call(rank: int, world: int) -> None:
    _, seen, _ = disagree(rank)
    assert seen.isnan().all()
    for _ in range(2):
        with pytest.raises(OutOfStep):
            dist.all_reduce(torch.ones(10))
    dist.destroy_process_group()


def told_by_a_call_on_the_cpu(rank: int, world: int) -> None:
    calls, _, _ = disagree(rank)
    with calls.on_cpu(), pytest.raises(OutOfStep):
        dist.all_reduce(torch.ones(10))
    dist.destroy_process_group()


def told_by_the_barrier(rank: int, world: int) -> None:
    calls, _, _ = disagree(rank)
    with calls.on_cpu(), pytest.raises(OutOfStep):
        dist.barrier()
    dist.destroy_process_group()


def told_by_the_work(rank: int, world: int) -> None:
    _, _, work = disagree(rank)
    with pytest.raises(OutOfStep):
        work.wait(timedelta(seconds=PATIENCE_S))
    with pytest.raises(OutOfStep):
        work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), OutOfStep)
    with pytest.raises(RuntimeError, match="rank 1"):
        work.get_future().wait()
    dist.destroy_process_group()


def told_by_backward(rank: int, world: int) -> None:
    disagree(rank)
    with pytest.raises(OutOfStep):
        torch.ones(1, requires_grad=True).sum().backward()
    torch.ones(1, requires_grad=True).sum().backward()
    dist.destroy_process_group()


def told_at_the_end(rank: int, world: int) -> None:
    disagree(rank)
    with pytest.raises(OutOfStep):
        dist.destroy_process_group()
    dist.destroy_process_group()  # once is enough
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "by",
    [
        told_by_the_next_call,
        told_by_a_call_on_the_cpu,
        told_by_the_barrier,
        told_by_the_work,
        told_by_backward,
        told_at_the_end,
    ],
)
@pytest.mark.threat("C15")
def test_an_error_that_comes_late_is_told(workers: Workers, by: Any) -> None:
    workers.run(with_a_group, by, group=False)


def all_of_a_queue(rank: int, world: int) -> None:
    """Calls made after the failing one fail too, and the error is raised once."""
    calls = taken_for_a_gpu()
    tensors = [torch.ones(1000 + (rank if n == 1 else 0)) for n in range(4)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    seen = calls.streams.put(lambda: [tensor.clone() for tensor in tensors])
    first, *others = seen.result(PATIENCE_S)
    assert (first == world).all()
    assert all(other.isnan().all() for other in others)
    assert works[0].is_success()
    with pytest.raises(OutOfStep):
        dist.all_reduce(torch.ones(10))
    dist.destroy_process_group()


@pytest.mark.threat("C15")
def test_a_queue_behind_a_failure(workers: Workers) -> None:
    workers.run(with_a_group, all_of_a_queue, group=False)


def sources_stay(rank: int, world: int) -> None:
    """A tensor that the call only reads is not a result, and keeps its values."""
    calls = taken_for_a_gpu()
    sent, given = torch.ones(1000 + rank), torch.ones(1000)
    dist.broadcast(sent, 0)
    dist.reduce(given, 1)
    seen = calls.streams.put(lambda: (sent.clone(), given.clone()))
    sent, given = seen.result(PATIENCE_S)
    assert sent.isnan().all() == (rank == 1)
    assert given.isnan().all() == (rank == 1)
    assert rank == 1 or ((sent == 1).all() and (given == 1).all())
    with calls.on_cpu(), pytest.raises(OutOfStep):  # who only sends may not know before
        dist.barrier()
    dist.destroy_process_group()


def test_what_is_only_read_is_not_overwritten(workers: Workers) -> None:
    workers.run(with_a_group, sources_stay, group=False)


def strided_results(rank: int, world: int) -> None:
    """A result that is copied to the user's memory is copied when it is done, or poisoned there."""
    calls = taken_for_a_gpu()
    right, wrong = torch.ones(8, 9), torch.ones(8 + rank, 9)
    for tensor in (right, wrong):
        dist.all_reduce(tensor.t()[::2])
    seen = calls.streams.put(lambda: (right.clone(), wrong.clone()))
    right, wrong = seen.result(PATIENCE_S)
    touched = torch.zeros_like(wrong, dtype=torch.bool)
    touched.t()[::2] = True
    assert torch.equal(right, torch.where(touched[:8], 2.0, 1.0))
    assert torch.equal(wrong.isnan(), touched)
    with pytest.raises(OutOfStep):
        dist.all_reduce(right)
    dist.destroy_process_group()


@pytest.mark.threat("C15")
def test_results_that_are_copied_are_poisoned_too(workers: Workers) -> None:
    workers.run(with_a_group, strided_results, group=False)


def done_and_not_yet_copied(rank: int, world: int) -> None:
    """The engine has finished; the GPU has still to copy the result."""
    calls, may_go_on = taken_for_a_gpu(), threading.Event()
    run_on = calls.streams.run_on

    def run_later(stream: int, task: Any) -> None:
        put(stream, lambda: may_go_on.wait(PATIENCE_S))
        run_on(stream, task)

    calls.streams.run_on = run_later  # type: ignore[method-assign]
    data = torch.ones(10, 20)
    work = dist.all_reduce(data.t(), async_op=True)
    while not work.done:
        time.sleep(0.001)
    assert not work.is_completed()
    assert work.wait()
    seen = calls.streams.put(data.clone)
    future = work.get_future()
    assert future.done()
    behind = put(calls.streams.side, data.clone)
    assert not seen.done()
    assert not behind.done()
    may_go_on.set()
    for copied in (seen, behind):
        assert (copied.result(PATIENCE_S) == world).all()
    assert work.is_completed()
    assert work.is_success()
    dist.destroy_process_group()


def test_a_result_that_is_not_copied_yet_is_waited_for(workers: Workers) -> None:
    workers.run(with_a_group, done_and_not_yet_copied, group=False)


# ---- where the host waits ------------------------------------------------------------------------


def beside_a_call_that_needs_the_driver(rank: int, world: int) -> None:
    calls = taken_for_a_gpu()
    driver_calls.begin()
    data = torch.ones(1000)
    dist.all_reduce(data)
    assert (data == world).all()
    driver_calls.end()
    dist.all_reduce(data)
    seen = calls.streams.put(data.clone)
    assert (seen.result(PATIENCE_S) == world * world).all()
    assert not driver_calls.any
    dist.destroy_process_group()


def more_than_can_be_given_ahead(rank: int, world: int) -> None:
    calls: Any = taken_for_a_gpu()
    submit = calls.engine.submit
    calls.engine.submit = lambda collective, stream=None: submit(collective)
    data = torch.ones(10, 20)
    dist.all_reduce(data.t())
    assert (data == world).all()
    work = dist.all_reduce(data, async_op=True)
    (result,) = work.get_future().wait()
    assert (result == world * world).all()
    with pytest.raises(OutOfStep):
        dist.all_reduce(torch.ones(10 + rank))
    dist.destroy_process_group()


@pytest.mark.parametrize("why", [beside_a_call_that_needs_the_driver, more_than_can_be_given_ahead])
def test_where_streams_cannot_wait_the_host_does(workers: Workers, why: Any) -> None:
    workers.run(with_a_group, why, group=False)


def dropped_by_the_caller(rank: int, world: int) -> bool:
    """The last reference to a call's tensors is not dropped on the group's thread."""
    calls: Any = taken_for_a_gpu()
    kept: list[Any] = []
    calls.streams.free_later = kept.append
    data = torch.ones(1000)
    gone = weakref.ref(data)
    work = dist.all_reduce(data, async_op=True)
    work.wait(timedelta(seconds=PATIENCE_S))
    del data, work
    gc.collect()
    alive = gone() is not None
    kept.clear()
    dist.destroy_process_group()
    return alive


def test_a_calls_tensors_go_with_the_callers_next(workers: Workers) -> None:
    assert workers.run(with_a_group, dropped_by_the_caller, group=False) == [True, True]


# ---- time, and the end --------------------------------------------------------------------------


def twice(data: torch.Tensor) -> None:
    """All that the first needs may have come before the news that the group is closed."""
    for _ in range(2):
        dist.all_reduce(data, async_op=True).wait(timedelta(seconds=PATIENCE_S))


def given_a_time(rank: int, world: int) -> None:
    calls, store = taken_for_a_gpu(), _get_default_store()
    data = torch.ones(100)
    assert dist.all_reduce(data, async_op=True).wait(timedelta(seconds=PATIENCE_S))
    assert (data == world).all()
    if rank:
        store.wait(["rank 0 gave up"])
        with pytest.raises(GroupClosed):
            twice(data)
        return
    work = dist.all_reduce(data, async_op=True)
    work.wait()
    with pytest.raises(PeerSilent):
        work.wait(timedelta(seconds=0.2))
    assert calls.streams.put(data.clone).result(PATIENCE_S).isnan().all()
    store.set("rank 0 gave up", "")
    dist.destroy_process_group()


def test_a_wait_with_a_time_blocks(workers: Workers) -> None:
    workers.run(with_a_group, given_a_time, group=False)


def aborted(rank: int, world: int) -> None:
    """A waiting stream is released; otherwise the GPU would wait forever."""
    calls = taken_for_a_gpu()
    store: Any = _get_default_store()
    if rank:
        store.wait(["rank 0 has left"])
        dist.destroy_process_group()
        return
    data = torch.ones(100)
    dist.all_reduce(data)
    seen = calls.streams.put(data.clone)
    group: Any = dist.group.WORLD
    group.abort()
    assert seen.result(PATIENCE_S).isnan().all()
    store.set("rank 0 has left", "")
    dist.destroy_process_group()


def test_an_abort_lets_streams_go(workers: Workers) -> None:
    workers.run(with_a_group, aborted, group=False)


def destroyed(rank: int, world: int) -> float:
    """destroy_process_group lets the calls that were made finish."""
    calls = taken_for_a_gpu()
    data = torch.ones(5000)
    for _ in range(5):
        dist.all_reduce(data)
    seen = calls.streams.put(lambda: data[-1].item())
    dist.destroy_process_group()
    value: float = seen.result(PATIENCE_S)
    return value


def test_what_was_called_is_done_when_the_group_is_destroyed(workers: Workers) -> None:
    assert workers.run(with_a_group, destroyed, group=False) == [32.0, 32.0]


ALONE = """
import os, sys, torch, torch.distributed as dist
from sealring.errors import PeerLost
os.environ.update(RANK="0", WORLD_SIZE="1", SEALRING_SECRET=sys.argv[1])
dist.init_process_group("sealring", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
group = dist.group.WORLD
"""


def ended(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ALONE + script, SECRET],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.threat("C16")
def test_a_script_that_ends_without_having_seen_the_error_fails() -> None:
    done = ended("group._deferred.defer(PeerLost('rank 7 is gone'))")
    assert done.returncode == 1
    assert "PeerLost: rank 7 is gone" in done.stderr
    done = ended("group._deferred.defer(PeerLost('rank 7 is gone')); group._deferred.clear()")
    assert done.returncode == 0, done.stderr


def test_an_error_is_owed_once() -> None:
    deferred, error = DeferredError(), GroupClosed("over")
    deferred.defer(error)
    with pytest.raises(GroupClosed):
        raise_deferred_errors()
    raise_deferred_errors()
    deferred.defer(error)  # of a call that was in the queue behind it
    assert deferred.take() is None
