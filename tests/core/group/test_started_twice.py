"""A job that was started twice on one store: the groups of a process are all of one run."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.workers import Workers

TIMEOUT = timedelta(seconds=30)


def wait_for(*marks: Path) -> None:
    end = time.monotonic() + 30
    while not all(mark.exists() for mark in marks):
        assert time.monotonic() < end
        time.sleep(0.01)


def who(name: str, group: dist.ProcessGroup | None = None) -> list[str]:
    names: list[str] = [""] * 2
    dist.all_gather_object(names, name, group=group)
    return names


def one_of_two_runs(place: int, _: int, folder: str) -> tuple[list[str], list[str]]:
    """Run a forms before run b. Then a further group is made: a0 and b1 arrive first, then b0,
    a1."""
    here = Path(folder)
    run, rank = "ab"[place // 2], place % 2
    name = f"{run}{rank}"
    if run == "b":
        wait_for(here / "a0", here / "a1")
    store = dist.FileStore(str(here / "store"), 4)
    dist.init_process_group("sealring", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    formed = who(name)
    (here / name).touch()
    if name in ("b0", "a1"):
        wait_for(here / "first-a0", here / "first-b1")
        time.sleep(1.0)  # a0 and b1 would have met by now
    else:
        wait_for(here / "b0", here / "b1")
        (here / f"first-{name}").touch()
    further = who(name, dist.new_group([0, 1], timeout=TIMEOUT))
    dist.destroy_process_group()
    return formed, further


@pytest.mark.threat("F6")
def test_further_groups_are_of_the_processes_that_formed_the_first(
    workers: Workers, tmp_path: Path
) -> None:
    seen = workers.run(one_of_two_runs, str(tmp_path), world=4, group=False)
    one, other = ["a0", "a1"], ["b0", "b1"]
    assert seen == [(one, one), (one, one), (other, other), (other, other)]
