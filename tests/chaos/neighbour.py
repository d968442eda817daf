"""A process of the workers' user that writes into everything of theirs that it can reach.

`python -m tests.chaos.neighbour PID ...` runs it. While groups are made it looks for their memory
files and for the sockets that pass those files. During traffic it also tries the workers' memory
and all their descriptors; earlier, a worker has no keys and refuses no process.

It reads lines: the first says that traffic has begun, the next that it has ended. Then it prints
what it tried and reached, and how often.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import select
import socket
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

_PIDFD_GETFD: Final = 438
_DESCRIPTORS: Final = 64
_CONNECTIONS: Final = 200
_libc = ctypes.CDLL(None, use_errno=True)


class Neighbour:
    """Starts and ends the hostile process for a world."""

    def __init__(self, fault: Any, pids: list[int], history: Any) -> None:
        from tests.attacks.unprivileged import CHECKOUT, start

        self._fault, self._history = fault, history
        self._process: subprocess.Popen[str] = start(
            [sys.executable, "-m", "tests.chaos.neighbour", *map(str, pids)],
            cwd=CHECKOUT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._steps = 0
        # A short world may end before the process has started, so wait until it has.
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def go_on(self, *, traffic: bool) -> None:
        """Called when the groups are made, and again when the traffic has ended."""
        self._steps += 1
        if self._steps > 2:
            return
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        if traffic:
            what = "a process of the workers' user writes into what it can reach"
            self._history.hit(self._fault, what, must_end=False)
        else:
            out, _ = self._process.communicate(timeout=60)
            told = json.loads(out)
            if not told["tried"]:
                self._history.trouble.append("the neighbour tried nothing")
            if told["reached"]:
                self._history.trouble.append(f"a neighbour reached {told['reached']}")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


# ---- the hostile process -------------------------------------------------------------------------


class _Hostile:
    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._mapped: dict[int, mmap.mmap] = {}
        """The mappings by the inode of their file."""
        self._connections: list[socket.socket] = []
        self.tried: Counter[str] = Counter()
        self.reached: Counter[str] = Counter()

    def map_files(self) -> None:
        """Maps the links' memory for writing, while it is made or later."""
        for pid in self._pids:
            self.tried["fd"] += 1
            with suppress(OSError):
                for name in os.listdir(f"/proc/{pid}/fd"):
                    with suppress(OSError):
                        self._map(f"/proc/{pid}/fd/{name}")
            self.tried["map_files"] += 1
            with suppress(OSError):
                for name in os.listdir(f"/proc/{pid}/map_files"):
                    with suppress(OSError):
                        self._map(f"/proc/{pid}/map_files/{name}")

    def _map(self, path: str) -> None:
        if "sealring" not in os.readlink(path):
            return
        fd = os.open(path, os.O_RDWR)
        try:
            inode, size = os.fstat(fd).st_ino, os.fstat(fd).st_size
            if inode not in self._mapped:
                self._mapped[inode] = mmap.mmap(fd, size)
                self.reached["memory of a link"] += 1
        finally:
            os.close(fd)

    def scribble(self) -> None:
        for memory in self._mapped.values():
            memory[random.randrange(len(memory))] ^= 1 << random.randrange(8)

    def crowd_inboxes(self) -> None:
        """Connects to the sockets that pass memory files, and leaves junk there."""
        with open("/proc/net/unix") as sockets:
            names = {line.split()[-1] for line in sockets if "@sealring/" in line}
        for name in names:
            self.tried["inbox"] += 1
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            stranger.setblocking(False)
            with suppress(OSError):
                stranger.connect("\0" + name[1:])
                kind = random.randrange(3)
                if kind:
                    fds = [0] * random.randrange(3) if kind == 1 else []
                    socket.send_fds(stranger, [os.urandom(random.choice([1, 36, 200]))], fds)
            self._connections.append(stranger)
        while len(self._connections) > _CONNECTIONS:
            self._connections.pop(0).close()

    def write_memory(self) -> None:
        """Writes into the workers' own memory."""
        for pid in self._pids:
            self.tried["mem"] += 1
            with suppress(OSError), open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
                self.reached["mem"] += 1
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                    span, rights = line.split()[:2]
                    if "w" in rights:
                        memory.seek(int(span.partition("-")[0], 16))
                        memory.write(os.urandom(64))

    def write_descriptors(self) -> None:
        """Writes into the workers' sockets and files."""
        for pid in self._pids:
            with suppress(OSError):
                pidfd = os.pidfd_open(pid)
                for number in range(_DESCRIPTORS):
                    self.tried["pidfd_getfd"] += 1
                    fd = _libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
                    if fd >= 0:
                        self.reached["descriptors"] += 1
                        with suppress(OSError):
                            os.write(fd, os.urandom(16))
                        os.close(fd)
                os.close(pidfd)


def main(pids: list[int]) -> None:
    hostile = _Hostile(pids)

    def told() -> bool:
        return bool(select.select([sys.stdin], [], [], 0)[0]) and sys.stdin.readline() in ("\n", "")

    print("up", flush=True)
    for traffic in (False, True):
        over = False
        while not over:
            hostile.map_files()
            hostile.scribble()
            hostile.crowd_inboxes()
            if traffic:
                hostile.write_memory()
                hostile.write_descriptors()
            over = told()
    print(json.dumps({"tried": hostile.tried, "reached": hostile.reached}))


if __name__ == "__main__":
    main([int(pid) for pid in sys.argv[1:]])
