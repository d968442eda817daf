"""SIGINT and SIGTERM end a waiting worker, or a whole job, and leave nothing behind."""

from __future__ import annotations

import gc
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from sealring.core.links.threads import IDLE_NAME
from sealring.core.settings import with_settings
from sealring.errors import GroupClosed
from tests.workers import Workers

# ---- one worker, which catches the interrupt -----------------------------------------------------


class Terminated(Exception):
    """A script's own handler of SIGTERM raises this."""


def terminate(*_: object) -> None:
    raise Terminated


def what_is_open() -> set[str]:
    """Returns the names of this process's open sockets, shared memory and threads."""
    found = {thread.name for thread in threading.enumerate()}
    found |= {
        line for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:" in line
    }
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the descriptor of the listing itself
            continue
        if target.startswith(("socket:", "/memfd:")):
            found.add(target)
    return found


def calls(how: str) -> Callable[[], object]:
    """Returns a call that waits for an absent rank; what needs that rank before is done here."""
    if how == "backward":
        ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
        return lambda: ddp(torch.ones(2, 4)).sum().backward()
    tensor = torch.ones(1000)
    if how == "wait":
        return lambda: dist.all_reduce(tensor, async_op=True).wait()
    return lambda: dist.all_reduce(tensor)


def in_turn(*calls: Callable[[], object]) -> None:
    """Runs the calls in turn: the first may still succeed before the news of the closed group."""
    for call in calls:
        call()


def interrupted(rank: int, world: int, how: str, number: int) -> str:
    signal.signal(signal.SIGTERM, terminate)
    before = what_is_open()
    dist.init_process_group("sealring")
    call = calls(how)
    dist.barrier()
    expected = KeyboardInterrupt if number == signal.SIGINT else Terminated
    store = distributed_c10d._get_default_store()
    if rank == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
        with pytest.raises(expected):
            call()
        store.set("interrupted", "")
        told = "interrupted"
    else:
        store.wait(["interrupted"])
        with pytest.raises(GroupClosed, match="rank 0 reported"):
            in_turn(call, dist.barrier)
        told = "was told"
    dist.destroy_process_group()
    del store
    gc.collect()  # torch's store has a socket too, and an exception's frames may hold the group
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    left = what_is_open() - before - {"sealring-signals", "pt_autograd_0", IDLE_NAME}
    assert not [name for name in left if not name.startswith("Thread-")], left
    return told


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("collective", signal.SIGINT),
        ("collective", signal.SIGTERM),
        ("wait", signal.SIGINT),
        ("wait", signal.SIGTERM),
        ("backward", signal.SIGINT),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
@pytest.mark.threat("F5")
def test_a_signal_ends_what_waits_and_the_others_are_told(
    workers: Workers, how: str, number: int, transport: str
) -> None:
    # The socket of `sealring top` lives as long as the process, so it is switched off.
    environment = {"SEALRING_TRANSPORT": transport, "SEALRING_LIVE": "0"}
    results = workers.run(interrupted, how, number, world=2, group=False, env=environment)
    assert results == ["interrupted", "was told"]


# ---- a whole job ---------------------------------------------------------------------------------

SCRIPT = """
import sys, time, torch, torch.distributed as dist
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("sealring")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
dist.barrier()
Path(sys.argv[1], f"ready-{dist.get_rank()}").touch()
if dist.get_rank() == 1:
    time.sleep(600)
elif sys.argv[2] == "backward":
    model(torch.ones(2, 4)).sum().backward()
else:
    dist.all_reduce(torch.ones(1000))
"""


def marked(mark: str) -> list[int]:
    """Returns all processes with `mark` in their environment, whatever their parents are."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:  # the process has ended, or belongs to another user
            continue
    return found


@pytest.mark.parametrize(
    ("number", "how", "status"),
    [(signal.SIGINT, "backward", 130), (signal.SIGTERM, "collective", 143)],
    ids=["SIGINT", "SIGTERM"],
)
@pytest.mark.threat("F5")
def test_a_signal_ends_a_job_and_nothing_is_left(
    tmp_path: Path, number: signal.Signals, how: str, status: int
) -> None:
    script, scratch = tmp_path / "train.py", tmp_path / "scratch"
    script.write_text(SCRIPT)
    scratch.mkdir()
    mark = f"mark-{secrets.token_hex(16)}"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SEALRING_")}
    job = subprocess.Popen(
        [Path(sys.executable).parent / "sealring", "run", "-n", "2", script, tmp_path, how],
        env={
            **clean,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(scratch),
            "MARK": mark,
            **with_settings(
                {}, allow_debuggers=True
            ),  # so that this test can see what the processes have, as any user
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)):
            assert job.poll() is None, job.communicate()[1][-3000:]
            time.sleep(0.05)
        time.sleep(0.5)
        processes = marked(mark)
        assert len(processes) >= 3, "the launcher and two workers"
        shared = memory_of(processes)
        assert shared, "the workers share memory"
        job.send_signal(number)
        _, errors = job.communicate(timeout=90)
    finally:
        for left in (survivors := marked(mark)):
            os.kill(left, signal.SIGKILL)
    assert survivors == []
    assert job.returncode == status, errors[-3000:]
    # Memory and sockets live as long as a process holds them, and no process does.
    assert not shared & memory_of(int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit())
    assert not [name for name in os.listdir("/dev/shm") if "sealring" in name]


def memory_of(processes: Iterable[int]) -> set[int]:
    """Returns the inodes of sealring's shared memory that these processes have mapped or open."""
    found = set()
    for process in processes:
        try:
            for line in Path(f"/proc/{process}/maps").read_text().splitlines():
                if "/memfd:sealring" in line:
                    found.add(int(line.split()[4]))
            for fd in Path(f"/proc/{process}/fd").iterdir():
                if os.readlink(fd).startswith("/memfd:sealring"):
                    found.add(fd.stat().st_ino)
        except OSError:
            continue
    return found
