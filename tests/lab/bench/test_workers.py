"""Processes that measurements and the demo run on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sealring.errors import PeerLost, WorkerFailed
from sealring.lab.bench.workers import Report, run_workers


def leaves(rank: int, report: Report, status: int) -> None:
    """Ends rank 1 without a message: no `finally`, no flush."""
    if rank:
        os._exit(status)
    report("here")


def test_a_worker_that_leaves_without_a_word_has_ended() -> None:
    assert list(run_workers(2, leaves, 0)) == [(0, "here")]


def test_a_worker_that_dies_is_told() -> None:
    with pytest.raises(WorkerFailed, match="worker 1 ended with exit status 3"):
        list(run_workers(2, leaves, 3))


def objects(rank: int, report: Report) -> None:
    raise ValueError(f"rank {rank} objects")


def test_a_worker_that_raises_is_told_with_its_traceback() -> None:
    with pytest.raises(WorkerFailed, match="ValueError: rank 0 objects"):
        list(run_workers(1, objects))


def loses_another(rank: int, report: Report, status: int) -> None:
    """Rank 0 loses rank 1 before the reason is known."""
    if not rank:
        raise PeerLost("rank 1 is gone", peer=1)
    time.sleep(0.5)
    if status:
        os._exit(status)
    raise ValueError("rank 1 has a fault")


def test_the_worker_that_failed_first_is_told_not_one_that_lost_it() -> None:
    with pytest.raises(WorkerFailed, match="ValueError: rank 1 has a fault"):
        list(run_workers(2, loses_another, 0))
    with pytest.raises(WorkerFailed, match="worker 1 ended with exit status 3"):
        list(run_workers(2, loses_another, 3))


def only_loses(rank: int, report: Report) -> None:
    if not rank:
        raise PeerLost("rank 1 is gone", peer=1)


def test_a_worker_that_lost_another_is_told_where_none_says_why() -> None:
    with pytest.raises(WorkerFailed, match="PeerLost: rank 1 is gone"):
        list(run_workers(2, only_loses))


def waits(rank: int, report: Report) -> None:
    report(os.getpid())
    time.sleep(60)


_PARENT = """
from sealring.lab.bench.workers import run_workers
from tests.lab.bench.test_workers import waits
for _, pid in run_workers(2, waits):
    print(pid, flush=True)
"""


def test_workers_do_not_outlive_a_parent_that_is_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # multiprocessing reports what it removes for the killed parent
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        workers = [Path("/proc") / parent.stdout.readline().strip() for _ in range(2)]
        assert all((worker / "stat").exists() for worker in workers)
        parent.kill()
    deadline = time.monotonic() + 60
    while any(worker.exists() for worker in workers):
        assert time.monotonic() < deadline, "a worker goes on"
        time.sleep(0.05)
