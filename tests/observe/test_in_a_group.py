"""Real groups: records written on an error, on request and on a signal, profiles, and metrics."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import sealring
from sealring.errors import ConfigurationError, OutOfStep
from sealring.observe import ProcessAccount
from sealring.observe.trace import read_flight_records
from tests.workers import Workers


def every_collective(world: int, *, async_op: bool = False) -> None:
    works = [
        dist.all_reduce(torch.ones(1000), async_op=async_op),
        dist.all_reduce(torch.ones(100_001), op=dist.ReduceOp.AVG, async_op=async_op),
        dist.broadcast(torch.ones(1000), src=1, async_op=async_op),
        dist.all_gather_into_tensor(torch.ones(world * 77), torch.ones(77), async_op=async_op),
        dist.reduce_scatter_tensor(torch.ones(77), torch.ones(world * 77), async_op=async_op),
        dist.barrier(async_op=async_op),
    ]
    for work in works:
        if work is not None:
            work.wait()


def recorded(rank: int, world: int) -> tuple[Any, Any]:
    group: Any = dist.group.WORLD
    every_collective(world)
    return sealring.flight_record().groups[-1], group.account()


def test_every_collective_is_recorded_with_what_it_sealed_and_opened(workers: Workers) -> None:
    own = {"SEALRING_JOB": "recorded"}  # so the group is one that no other test used
    results = workers.run(recorded, world=3, env=own)
    assert len({flight.id for flight, _ in results}) == 1
    for rank, (flight, account) in enumerate(results):
        assert [each.number for each in flight.collectives] == [1, 2, 3, 4, 5, 6]
        assert [each.operation for each in flight.collectives] == [
            "all_reduce", "all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier"
        ]  # fmt: skip
        assert [each.reduction for each in flight.collectives] == [
            "sum", "avg", None, None, "sum", None
        ]  # fmt: skip
        assert [each.root for each in flight.collectives] == [None, None, 1, None, None, None]
        assert [each.bytes for each in flight.collectives] == [4000, 400_004, 4000, 924, 924, 0]
        assert {each.state for each in flight.collectives} == {"done"}
        assert sum(each.sealed_bytes for each in flight.collectives) == account["sealed_bytes"]
        assert sum(each.opened_bytes for each in flight.collectives) == account["opened_bytes"]
        assert flight.collectives[2].sealed_bytes == (4000 if rank == 1 else 0)
        assert (flight.rank, flight.members) == (rank, [0, 1, 2])


def fails(rank: int, world: int) -> None:
    dist.all_reduce(torch.ones(10))
    works = [dist.all_reduce(torch.ones(2000 if rank else 1000), async_op=True)]
    works.append(dist.broadcast(torch.ones(5), src=0, async_op=True))
    for work in works:
        work.wait()


def test_a_failure_leaves_a_record_and_a_trace_of_every_rank(
    workers: Workers, tmp_path: Path
) -> None:
    place = tmp_path / "not" / "there" / "yet"
    env = {"SEALRING_TRACE": str(place), "SEALRING_JOB": "breaks"}
    errors = workers.run(fails, world=2, env=env, errors=True)
    assert [type(error) for error in errors] == [OutOfStep, OutOfStep]
    accounts = read_flight_records([place])
    assert [account.rank for account in accounts] == [0, 1]
    for account, error in zip(accounts, errors, strict=True):
        stem = f"breaks-rank-{account.rank}-{account.pid}"
        trace = json.loads((place / f"{stem}.trace.json").read_text())
        assert any(event.get("cname") == "terrible" for event in trace["traceEvents"])
        group = account.groups[-1]
        assert group.state == "failed"
        failed = group.collective(2)
        assert failed is not None
        assert failed.error == f"group.out_of_step: {error}"
        assert failed.bytes == (8000 if account.rank else 4000)
        assert os.stat(place / f"{stem}.flight.json").st_mode & 0o777 == 0o600
    assert sorted(path.suffix for path in place.iterdir()) == [".json"] * 4


def unwritable(rank: int, world: int, directory: str) -> None:
    dist.all_reduce(torch.ones(10))
    os.rmdir(directory) if rank == 0 else None
    Path(directory).write_text("a file") if rank == 0 else None
    dist.barrier()
    fails(rank, world)


def test_a_record_that_cannot_be_written_does_not_hide_the_failure(
    workers: Workers, tmp_path: Path
) -> None:
    place = str(tmp_path / "traces")
    env = {"SEALRING_TRACE": place, "SEALRING_JOB": "unwritable"}
    errors = workers.run(unwritable, place, world=2, env=env, errors=True)
    assert [type(error) for error in errors] == [OutOfStep, OutOfStep]


def messages_recorded(rank: int, world: int) -> tuple[Any, list[str]]:
    other = 1 - rank
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        if rank == 0:
            dist.send(torch.ones(10), other, tag=3)
            dist.recv(torch.zeros(50_000), other)
        else:
            dist.recv(torch.zeros(10), tag=3)  # from any rank
            dist.send(torch.ones(50_000), other)
    shown = [event.name for event in profile.events() or [] if event.name.startswith("sealring:")]
    return sealring.flight_record().groups[-1], shown


def test_messages_are_in_the_record_and_in_profiles(workers: Workers) -> None:
    own = {"SEALRING_JOB": "messages"}  # so the group is one that no other test used
    results = workers.run(messages_recorded, world=2, env=own)
    seen = [
        [(m.operation, m.peer, m.tag, m.bytes, m.dtype, m.state) for m in flight.messages]
        for flight, _ in results
    ]
    assert seen == [
        [("send", 1, 3, 40, "float32", "done"), ("recv", 1, 0, 200_000, "float32", "done")],
        [("recv", 0, 3, 40, "float32", "done"), ("send", 0, 0, 200_000, "float32", "done")],
    ]
    for flight, _ in results:
        assert flight.collectives == []
        assert all(m.ended_ns >= m.posted_ns for m in flight.messages)
    assert [flight.sealed_bytes for flight, _ in results] == [40, 200_000]
    assert [flight.opened_bytes for flight, _ in results] == [200_000, 40]
    ranges = [[name for name in shown if "waiting" not in name] for _, shown in results]
    assert ranges == [
        ["sealring::send (40 bytes sealed)", "sealring::recv (200000 bytes opened)"],
        ["sealring::recv (40 bytes opened)", "sealring::send (200000 bytes sealed)"],
    ]
    assert "sealring::recv (200000 bytes opened), waiting" in results[0][1]


def sends_too_much(rank: int, world: int) -> None:
    if rank == 0:
        dist.send(torch.ones(3), 1)
        dist.recv(torch.ones(3), 1)
    else:
        dist.recv(torch.ones(2), 0)


def test_a_failed_message_leaves_a_record_of_every_rank(workers: Workers, tmp_path: Path) -> None:
    env = {"SEALRING_TRACE": str(tmp_path), "SEALRING_JOB": "mail"}
    errors = workers.run(sends_too_much, world=2, env=env, errors=True)
    assert [type(error) for error in errors] == [OutOfStep, OutOfStep]
    for account, error in zip(read_flight_records([tmp_path]), errors, strict=True):
        group = account.groups[-1]
        assert group.state == "failed"
        assert group.messages[-1].error == f"group.out_of_step: {error}"
        assert group.messages[-1].bytes == (12 if account.rank == 0 else 8)


def on_request(rank: int, world: int, directory: str) -> tuple[str, str]:
    dist.all_reduce(torch.ones(10))
    files = sealring.dump_flight_record(directory)
    group: Any = dist.group.WORLD
    dumped = ProcessAccount.from_json(files.record.read_text(), "dumped").groups[-1]
    assert group.recorder.collective(dumped.collectives[-1].number).state == "done"
    assert group.recorder.collective(10**6) is None
    with pytest.raises(ConfigurationError, match="SEALRING_TRACE"):
        sealring.dump_flight_record()
    return str(files.record), str(files.trace)


def test_the_record_is_written_on_request(workers: Workers, tmp_path: Path) -> None:
    results = workers.run(on_request, str(tmp_path), world=2)
    assert sorted(name for files in results for name in files) == sorted(
        str(path) for path in tmp_path.iterdir()
    )


def signalled(rank: int, world: int, directory: str) -> list[str]:
    came: list[int] = []
    dist.destroy_process_group()
    signal.signal(signal.SIGUSR2, lambda number, _: came.append(number))
    try:
        dist.init_process_group("sealring")
        dist.barrier()
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(0.01)
        assert came == [signal.SIGUSR2], "the script's own handler runs too"
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    return [path.name for path in Path(directory).glob(f"*-rank-{rank}-*.flight.json")]


def test_a_signal_writes_the_record_if_that_was_asked_for(workers: Workers, tmp_path: Path) -> None:
    env = {
        "SEALRING_TRACE": f"{tmp_path}:USR2",
        "SEALRING_JOB": "signals",
    }
    results = workers.run(signalled, str(tmp_path), world=2, env=env)
    assert [len(names) for names in results] == [1, 1]


def profiled(rank: int, world: int, async_op: bool) -> tuple[list[str], list[str]]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        every_collective(world, async_op=async_op)
    shown = [event.name for event in profile.events() or [] if event.name.startswith("sealring:")]
    recorded = sealring.flight_record().groups[-1].collectives[-6:]
    expected = [f"{each.operation} ({each.sealed_bytes} bytes sealed)" for each in recorded]
    return shown, expected


@pytest.mark.parametrize("async_op", [False, True])
def test_profiles_show_each_collective_with_its_sealed_bytes(
    workers: Workers, async_op: bool
) -> None:
    for shown, expected in workers.run(profiled, async_op, world=3):
        names = [name.removeprefix("sealring:").removeprefix(":") for name in shown]
        assert names == expected


def test_asking_for_a_record_without_a_group_says_so() -> None:
    code = (
        "import sealring\n"
        "try: sealring.flight_record()\n"
        "except sealring.ConfigurationError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 'Call init_process_group("sealring") first' in done.stdout
