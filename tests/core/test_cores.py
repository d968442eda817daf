"""How many cores a worker may use, by its CPU mask and its control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sealring.core.engine.lanes import MOST_THREADS, threads_by_default
from sealring.core.settings import usable_cores


@pytest.fixture
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


GROUP = {"proc/self/cgroup": "0::/jobs/one\n"}
V1 = {"proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/jobs/one\n"}


@pytest.mark.usefixtures("sixteen")
@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 16),
        ({**GROUP, "sys/fs/cgroup/jobs/one/cpu.max": "max 100000\n"}, 16),
        ({**GROUP, "sys/fs/cgroup/jobs/one/cpu.max": "400000 100000\n"}, 4),
        ({**GROUP, "sys/fs/cgroup/jobs/one/cpu.max": "50000 100000\n"}, 1),
        ({**GROUP, "sys/fs/cgroup/jobs/one/cpu.max": "6400000 100000\n"}, 16),
        ({**GROUP, "sys/fs/cgroup/jobs/cpu.max": "300000 100000\n"}, 3),
        ({**GROUP, "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ({**GROUP, "sys/fs/cgroup/cpu.max": "nonsense\n"}, 16),
        (
            {
                **V1,
                "sys/fs/cgroup/cpu/jobs/one/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu/jobs/one/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        (
            {
                **V1,
                "sys/fs/cgroup/cpu/jobs/one/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/jobs/one/cpu.cfs_period_us": "100000\n",
            },
            16,
        ),
    ],
)
def test_the_narrowest_limit_counts(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    assert usable_cores(write(tmp_path, files)) == cores


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(16, 2, 8), (16, 8, 2), (2, 2, 1), (2, 8, 1), (256, 2, 8)]
)
def test_ranks_of_a_machine_share_its_cores(cores: int, ranks: int, threads: int) -> None:
    assert threads_by_default(cores, ranks) == threads <= MOST_THREADS
