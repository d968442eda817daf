"""Tries to reach the memory of two workers from another process of the same user.

`python -m tests.attacks.neighbour` prints as JSON what it could open of the workers while they made
a group and while they trained. test_same_user.py runs it as a user without privileges, because
nothing is closed to root.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.workers import SECRET

WORLD: Final = 2
_PIDFD_GETFD: Final = 438
_PTRACE_ATTACH, _PTRACE_DETACH = 16, 17
_libc = ctypes.CDLL(None, use_errno=True)


# ---- the workers --------------------------------------------------------------------------------


def train(rank: int, store: str) -> None:
    """Makes a group and sums until its input ends."""
    import torch
    import torch.distributed as dist

    def sum_once() -> None:
        tensor = torch.full((100_000,), float(rank + 1))
        dist.all_reduce(tensor)
        assert bool((tensor == 3).all()), "a wrong element"

    print("begun", flush=True)
    sys.stdin.readline()
    dist.init_process_group("sealring", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    sum_once()
    print("ready", flush=True)
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), over.set()), daemon=True).start()
    while True:
        last = torch.tensor([float(over.is_set())])
        dist.all_reduce(last)  # all ranks go on, or none
        if last.item():
            break
        sum_once()
    dist.destroy_process_group()
    print("all sums were right", flush=True)


# ---- what their neighbour tries -----------------------------------------------------------------


def outcome(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except OSError as error:
        return type(error).__name__
    return "reached"


def checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result


def read_memory(pid: int) -> None:
    """Reads the first bytes of the process's first memory mapping."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb") as memory:
        memory.seek(int(maps.readline().partition("-")[0], 16))
        memory.read(16)


def open_files(pid: int) -> None:
    for name in os.listdir(f"/proc/{pid}/fd"):
        os.readlink(f"/proc/{pid}/fd/{name}")


def take_descriptor(pid: int) -> None:
    """Takes a file descriptor from another process, as torch does for CUDA memory."""
    pidfd = os.pidfd_open(pid)
    try:
        os.close(checked(_libc.syscall(_PIDFD_GETFD, pidfd, 1, 0)))
    finally:
        os.close(pidfd)


def attach(pid: int) -> None:
    """Attaches with ptrace, as a debugger does."""
    checked(_libc.ptrace(_PTRACE_ATTACH, pid, 0, 0))
    os.waitpid(pid, 0x40000000)  # __WALL
    _libc.ptrace(_PTRACE_DETACH, pid, 0, 0)


ATTEMPTS: Final[dict[str, Callable[[int], Any]]] = {
    "mem": read_memory,
    "fd": open_files,
    "map_files": lambda pid: os.listdir(f"/proc/{pid}/map_files"),
    "environ": lambda pid: Path(f"/proc/{pid}/environ").read_bytes(),
    "pidfd_getfd": take_descriptor,
    "ptrace": attach,
}


def race(pids: list[int], over: threading.Event, seen: Counter[str]) -> None:
    """Tries to open a link's memory while it can still be mapped for writing."""
    while not over.is_set():
        for pid in pids:
            try:
                names = os.listdir(f"/proc/{pid}/fd")
            except OSError as error:
                seen[type(error).__name__] += 1
                continue
            for name in names:
                path = f"/proc/{pid}/fd/{name}"
                try:
                    if "sealring" not in os.readlink(path):
                        continue
                    os.close(os.open(path, os.O_RDWR))
                    seen["reached"] += 1
                except OSError as error:
                    seen[type(error).__name__] += 1


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {
            "SEALRING_SECRET": SECRET,
            "SEALRING_ADDRESS": "127.0.0.1",
            "SEALRING_TRANSPORT": "shm",
            "OMP_NUM_THREADS": "1",
        }
        workers = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.attacks.neighbour", str(rank), f"{folder}/store"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=env,
            )
            for rank in range(WORLD)
        ]
        try:
            print(json.dumps(attack(workers)))
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


def attack(workers: list[subprocess.Popen[str]]) -> dict[str, Any]:
    def all_say(word: str) -> None:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == f"{word}\n"

    def all_go_on() -> None:
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("\n")
            worker.stdin.flush()

    pids = [worker.pid for worker in workers]
    all_say("begun")
    over, seen = threading.Event(), Counter[str]()
    racer = threading.Thread(target=race, args=(pids, over, seen))
    racer.start()
    all_go_on()
    all_say("ready")
    over.set()
    racer.join()
    training = {name: outcome(lambda a=attempt: a(pids[0])) for name, attempt in ATTEMPTS.items()}
    all_go_on()
    all_say("all sums were right")
    return {"during set-up": seen, "training": training, "user": os.getuid()}


if __name__ == "__main__":
    main() if len(sys.argv) == 1 else train(int(sys.argv[1]), sys.argv[2])
