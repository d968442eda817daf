"""The host goes on while streams wait for results.

The ranks share a GPU, where streams wait only if a setting says so.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import _get_default_store

from sealring.core.settings import with_settings
from sealring.errors import GroupError, PeerLost, TamperedRecord, Unsupported
from sealring.lab.bench.workers import Report, run_workers
from sealring.lab.demo.wiretap import Address, Flip, LyingStore, Relay, real_address
from tests.gpu.shared_gpu import each_wire, enter, environment_of
from tests.gpu.test_group import sharded, trained

STREAMS_WAIT = with_settings({}, cuda_wait="stream")
TIMEOUT = timedelta(seconds=30)
MILLION = 1_000_000


def in_group(ranks: int, body: Callable[..., Any], wire: str = "auto") -> list[Any]:
    """Returns what body(rank) returns on each rank of a group on one GPU."""
    environment = environment_of(wire, **STREAMS_WAIT)
    found = dict(run_workers(ranks, _member, body, environment=environment))
    return [found[rank] for rank in range(ranks)]


def _member(rank: int, report: Report, body: Callable[..., Any]) -> None:
    enter(rank)
    dist.init_process_group("sealring", timeout=TIMEOUT)
    introduced()
    report(body(rank))
    dist.barrier()
    dist.destroy_process_group()


def introduced() -> None:
    """Makes the calls that wait for other things at their first use.

    The first call waits for all ranks, which exchange facts about their GPUs. The first launch of a
    kernel waits for all work of the GPU, because its code is loaded.
    """
    data = torch.full((10,), 1.0, device="cuda")
    dist.all_reduce(data)
    assert bool((data * 2 == 4).all()) == (dist.get_world_size() == 2)
    data += 1
    data.sum().item()
    float((data[-1] + 1) / 2)
    torch.cuda._sleep(1)
    torch.cuda.synchronize()


# ---- who waits ----------------------------------------------------------------------------------


def the_stream_waits(rank: int) -> bool:
    """Rank 1 calls only after rank 0's call on a separate stream has returned."""
    store, side = _get_default_store(), torch.cuda.Stream()
    if rank:
        store.wait(["rank 0 went on"])
    with torch.cuda.stream(side):
        # So few kernels, even over links, that all of them are launched ahead.
        data = torch.full((4 * MILLION,), rank + 1.0, device="cuda")
        dist.all_reduce(data)
        doubled = data * 2
        over = side.record_event()
    if rank == 0:
        went_on = not over.query()
        store.set("rank 0 went on", "")
    else:
        went_on = True
    side.synchronize()
    return went_on and bool((doubled == 6).all())


@each_wire
def test_the_host_goes_on_and_the_stream_waits(wire: str) -> None:
    assert in_group(2, the_stream_waits, wire) == [True, True]


def beside_a_long_kernel(rank: int) -> bool:
    """Streams without the call's work neither delay the call nor wait for it."""
    busy, side = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(6_000_000_000)
        still_busy = busy.record_event()
    with torch.cuda.stream(side):
        data = torch.ones(3 * MILLION, device="cuda")
        work = dist.all_reduce(data, async_op=True)
        work.wait()
        doubled = data * 2
    side.synchronize()
    overlapped = not still_busy.query()
    assert work.wait(TIMEOUT)
    busy.synchronize()
    return overlapped and bool((doubled == 4).all())


@pytest.mark.parametrize("wire", ["auto", "nccl"])
def test_another_streams_long_kernel_is_not_waited_for(wire: str) -> None:
    assert in_group(2, beside_a_long_kernel, wire) == [True, True]


def freed_early(rank: int) -> bool:
    """Memory that the script frees is not reused while it is still being written or read."""
    side = torch.cuda.Stream()
    right, works = [], []
    for turn in range(30):
        with torch.cuda.stream(side):
            data = torch.zeros(2 * MILLION, device="cuda")
            torch.cuda._sleep(2_000_000)
            data += turn + rank
            works.append(dist.all_reduce(data, async_op=True))
            if turn % 2:
                works[-1].wait()
                right.append((data == 2 * turn + 1).all())
            del data
            torch.empty(2 * MILLION, device="cuda").fill_(-1)
        torch.empty(2 * MILLION, device="cuda").fill_(-2)
    for work in works:
        work.wait(TIMEOUT)
    return all(bool(each) for each in right)


@pytest.mark.parametrize("wire", ["auto", "nccl"])
def test_tensors_freed_early(wire: str) -> None:
    assert in_group(2, freed_early, wire) == [True, True]


def through_futures(rank: int) -> float:
    """Callbacks run at once, as in DDP's hooks, and their kernels wait for the call."""
    data = torch.full((5 * MILLION,), 1.0 + rank, device="cuda")
    future = dist.all_reduce(data, async_op=True).get_future()
    done_at_once = future.done()
    halved = future.then(lambda done: done.wait()[0] / 2)
    assert done_at_once
    return float(halved.wait()[-1])


def test_futures() -> None:
    assert in_group(2, through_futures) == [1.5, 1.5]


def many_streams(rank: int) -> bool:
    """Holds streams of every priority that torch has, more than the hardware has queues."""
    store = _get_default_store()
    streams = [torch.cuda.Stream(priority=-(n % 4)) for n in range(64)]
    data = torch.ones(4 * MILLION, device="cuda")
    results = []
    if rank:
        store.wait(["all are held"])
    work = dist.all_reduce(data, async_op=True)
    for stream in streams:
        with torch.cuda.stream(stream):
            work.wait()
            results.append(data[-1] + 1)
    if rank == 0:
        store.set("all are held", "")
    torch.cuda.synchronize()
    return all(float(result) == 3 for result in results)


def test_many_streams_of_every_priority() -> None:
    assert in_group(2, many_streams) == [True, True]


def several_groups(rank: int) -> bool:
    """Three groups have calls under way at once, on separate streams."""
    groups = [dist.new_group() for _ in range(3)]
    results = []
    for n in range(24):
        with torch.cuda.stream(torch.cuda.Stream()):
            data = torch.full((MILLION,), float(n), device="cuda")
            dist.all_reduce(data, group=groups[n % 3])
            results.append(data + 1)
    torch.cuda.synchronize()
    return all(bool((result == 2 * n + 1).all()) for n, result in enumerate(results))


@pytest.mark.parametrize("wire", ["auto", "nccl"])
def test_several_groups(wire: str) -> None:
    assert in_group(2, several_groups, wire) == [True, True]


# ---- what the driver does meanwhile -------------------------------------------------------------


def more_launches_than_a_queue_holds() -> None:
    counter = torch.zeros(1, device="cuda")
    for _ in range(5000):
        counter += 1
    assert float(counter) == 5000


def memory_given_back() -> None:
    torch.cuda.empty_cache()


def code_loaded() -> None:
    torch.special.bessel_j0(torch.ones(10, device="cuda"))  # compiled at its first call


def while_the_stream_waits(rank: int, report: Report, act: Callable[[], None]) -> None:
    enter(rank)
    dist.init_process_group("sealring", timeout=TIMEOUT)
    data = torch.ones(20 * MILLION, device="cuda")
    torch.empty(100 * MILLION, device="cuda")  # freed at once, so that there is memory to give back
    torch.zeros(1, device="cuda").add_(1).item()
    introduced()
    if rank:
        time.sleep(3)
    dist.all_reduce(data)
    act()
    report(float(data[-1]))
    dist.barrier()
    dist.destroy_process_group()


@each_wire
@pytest.mark.parametrize("act", [more_launches_than_a_queue_holds, memory_given_back, code_loaded])
def test_the_driver_can_be_used_while_a_stream_waits(act: Callable[[], None], wire: str) -> None:
    """Each of these calls keeps the driver's lock until the GPU has gone further."""
    reports = dict(
        run_workers(
            2, while_the_stream_waits, act, environment=environment_of(wire, **STREAMS_WAIT)
        )
    )
    assert reports == {0: 2.0, 1: 2.0}


def beside_a_message(rank: int) -> float:
    """A collective that a stream waits for does not delay a message that is under way."""
    data, mail = torch.ones(8 * MILLION, device="cuda"), torch.ones(MILLION, device="cuda")
    if rank == 0:
        torch.cuda._sleep(500_000_000)
        sent: Any = dist.isend(mail * 5, 1)
        dist.all_reduce(data)
        more_launches_than_a_queue_holds()
        sent.wait()
    else:
        dist.recv(mail, 0)
        dist.all_reduce(data)
    return float(data[-1]) + (float(mail[-1]) if rank else 0)


def test_messages_beside_collectives() -> None:
    assert in_group(2, beside_a_message) == [2.0, 7.0]


def many_buckets(rank: int) -> bool:
    """Queues more calls than a queue holds, of several types, while keys are replaced."""
    tensors = [
        torch.full((3 * MILLION + n,), float(n % 7), device="cuda").to(dtype)
        for n in range(30)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    gathered = torch.empty(2 * MILLION, device="cuda")
    works.append(
        dist.all_gather_into_tensor(
            gathered, torch.full((MILLION,), rank, device="cuda").float(), async_op=True
        )
    )
    for work in works:
        work.wait()
    right = all(bool((each == 2 * (n // 2 % 7)).all()) for n, each in enumerate(tensors))
    return right and float(gathered.sum()) == MILLION


@each_wire
def test_many_calls_at_once(wire: str) -> None:
    environment = environment_of(wire, **with_settings(STREAMS_WAIT, rekey_bytes=20 * MILLION))
    found = dict(run_workers(2, _member, many_buckets, environment=environment))
    assert found == {0: True, 1: True}


# ---- what fails ---------------------------------------------------------------------------------


def attacked(rank: int, report: Report, port: int, relay: Address, told: str) -> None:
    torch.cuda.set_device(0)
    store: Any = TCPStore("127.0.0.1", port, is_master=False)
    if rank == 1:
        store = LyingStore(store, about=0, relay=relay)
    dist.init_process_group("sealring", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    good = torch.ones(4 * MILLION, device="cuda")
    bad = torch.ones(4 * MILLION, device="cuda")
    dist.all_reduce(good)
    dist.all_reduce(bad)
    assert bool((good == 2).all())
    poisoned, errors = bool(bad.isnan().all()), []
    try:
        if told == "next call":
            dist.all_reduce(good)
        elif told == "barrier":
            dist.barrier()
        elif told == "backward":
            torch.ones(3, device="cuda", requires_grad=True).sum().backward()
        else:
            dist.destroy_process_group()
    except GroupError as error:
        errors.append((told, type(error).__name__))
    while dist.is_initialized():
        try:
            dist.destroy_process_group()
        except GroupError as error:
            errors.append(("the end", type(error).__name__))
    report((poisoned, errors))


@pytest.mark.parametrize("told", ["next call", "barrier", "backward", "destroy"])
@pytest.mark.threat("C15")
def test_a_changed_record_gives_no_result_and_an_error(told: str) -> None:
    """Rank 1 sees the change and has no result; rank 0 may already have all that it needs."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # The network carries the records: inside a host an attacker could change nothing.
    environment = {**STREAMS_WAIT, "SEALRING_TRANSPORT": "tcp", "SEALRING_GPU_WIRE": "links"}
    with Relay(lambda: real_address(server), Flip(gradient=2)) as relay:
        found = dict(
            run_workers(2, attacked, server.port, relay.address, told, environment=environment)
        )
    assert found[1] == (True, [(told, TamperedRecord.__name__)])
    assert {name for _, name in found[0][1]} <= {TamperedRecord.__name__}


def left_alone(rank: int, report: Report, call: Callable[[torch.Tensor], None]) -> None:
    """The peer dies while a stream waits for the call."""
    enter(rank)
    dist.init_process_group("sealring", timeout=TIMEOUT)
    introduced()
    if rank:
        report("gone")
        time.sleep(1)
        os._exit(0)
    data = torch.ones(MILLION, device="cuda")
    call(data)
    poisoned = bool(data.isnan().all())
    try:
        call(data)
    except PeerLost as error:
        report((poisoned, error.peer))
    dist.destroy_process_group()


def reduced_with_rank_1(data: torch.Tensor) -> None:
    dist.all_reduce(data)


def received_from_rank_1(data: torch.Tensor) -> None:
    dist.recv(data, 1)


@pytest.mark.parametrize("call", [reduced_with_rank_1, received_from_rank_1])
@pytest.mark.parametrize("wire", ["auto", "nccl"])
@pytest.mark.threat("C8")
def test_a_stream_that_waits_for_the_dead_is_let_go(call: Callable[..., None], wire: str) -> None:
    environment = environment_of(wire, **STREAMS_WAIT)
    assert dict(run_workers(2, left_alone, call, environment=environment))[0] == (True, 1)


def dies_on_the_way(rank: int, report: Report) -> None:
    """Rank 1 dies while the ranks make their NCCL communicator, which needs all of them."""
    enter(rank)
    dist.init_process_group("sealring", timeout=TIMEOUT)
    if rank == 1:
        from sealring.core.engine.cuda import ways

        def die(*_: object) -> None:
            report("gone")
            time.sleep(1)
            os._exit(0)

        ways.Nccl.open = die  # type: ignore[method-assign,assignment]
    began = time.monotonic()
    try:
        dist.all_reduce(torch.ones(10, device="cuda"))
    except PeerLost as error:
        report((error.peer, time.monotonic() - began < TIMEOUT.total_seconds() / 2))
    dist.destroy_process_group()


@pytest.mark.threat("C7")
def test_a_peer_that_dies_while_the_communicator_is_made() -> None:
    environment = environment_of("nccl", **STREAMS_WAIT)
    found = dict(run_workers(3, dies_on_the_way, environment=environment))
    assert found == {0: (1, True), 1: "gone", 2: (1, True)}


# ---- training -----------------------------------------------------------------------------------


def test_ddp_and_fsdp2_have_the_losses_of_one_process() -> None:
    for body in (trained, sharded):
        alone = in_group(1, body)[0]
        for losses in in_group(2, body):
            assert losses == pytest.approx(alone, rel=1e-4)


# ---- errors that show when a group is made -----------------------------------------------------


def refused(rank: int, report: Report, port: int, break_gpu: Callable[[], Any]) -> None:
    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")
    store, kept = TCPStore("127.0.0.1", port, is_master=False), None
    if rank:
        store.wait(["rank 0 has a GPU"])
        kept = break_gpu()
        store.set("it is poisoned", "")
    else:
        store.set("rank 0 has a GPU", "")
        store.wait(["it is poisoned"])
    try:
        dist.init_process_group("sealring", timeout=TIMEOUT)
    except Unsupported as error:
        report(str(error))
    del kept


def leave_no_memory() -> torch.Tensor:
    free, _ = torch.cuda.mem_get_info()
    return torch.empty(free - (8 << 20), dtype=torch.uint8, device="cuda")


def break_the_kernels() -> None:
    from sealring.core.engine.cuda import driver

    compile_code = driver.compile_code
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()  # a folder without good kernels
    driver.compile_code = lambda name, _, *rest: compile_code(name, b"this is no kernel", *rest)


@pytest.mark.parametrize(
    ("break_gpu", "reason"),
    [(leave_no_memory, "memory"), (break_the_kernels, "could not be compiled")],
)
def test_a_gpu_that_cannot_serve_shows_on_every_rank(break_gpu: Any, reason: str) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = dict(run_workers(2, refused, server.port, break_gpu))
    assert sorted(told) == [0, 1]
    assert all(reason in text.lower() for text in told.values())
    # Both ranks are on one GPU, so both lack the memory.
    assert break_gpu is leave_no_memory or "rank 1" in told[0]
