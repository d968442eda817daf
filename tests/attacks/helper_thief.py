"""A process of the same user that tries to take what a checkpoint's helper process receives.

With the argument `victim` this program is the worker: it starts the thief, saves a checkpoint, and
prints as JSON what the thief could take.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

_PIDFD_OPEN, _PIDFD_GETFD = 434, 438
_LIBC = ctypes.CDLL(None, use_errno=True)


def helpers() -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                words = Path("/proc", name, "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"sealring.vault.staging" in words:
                found.append(int(name))
    return found


def take_descriptors(pid: int, told: Counter[str]) -> None:
    process = _LIBC.syscall(_PIDFD_OPEN, pid, 0)
    if process < 0:
        return
    for number in range(3, 12):
        taken = _LIBC.syscall(_PIDFD_GETFD, process, number, 0)
        if taken < 0:
            told[errno.errorcode[ctypes.get_errno()]] += 1
            continue
        target = os.readlink(f"/proc/self/fd/{taken}")
        if target.startswith(("socket:", "/memfd:")):
            told[target.split(":")[0]] += 1
        os.close(taken)
    os.close(process)


def connect_first(told: Counter[str]) -> None:
    for line in Path("/proc/net/unix").read_text().splitlines():
        if "@sealring-helper-" not in line:
            continue
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(1)
            try:
                stranger.connect("\0" + line.split("@")[1])
                told["bytes" if stranger.recv(1) else "closed"] += 1
            except OSError as problem:
                told[type(problem).__name__] += 1


def steal() -> None:
    told: Counter[str] = Counter()
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    print("ready", flush=True)
    while not ended.is_set():
        for pid in helpers():
            take_descriptors(pid, told)
        connect_first(told)
    print(json.dumps(told))


def save() -> None:
    import warnings

    import torch
    import torch.distributed.checkpoint as dcp

    from sealring.vault import CheckpointReader, CheckpointWriter, Vault, keys
    from tests.workers import SECRET

    warnings.simplefilter("ignore")
    os.environ |= {"SEALRING_SECRET": SECRET, "SEALRING_JOB": "tests"}
    with tempfile.TemporaryDirectory() as folder:
        keys.make_key_file(Path(folder, "key"))
        opener = keys.key_file(Path(folder, "key"))
        vault = Vault.create(Path(folder, "vault"), opener, "owner")
        thief = subprocess.Popen(
            [sys.executable, "-m", "tests.attacks.helper_thief"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert thief.stdin is not None
        assert thief.stdout is not None
        thief.stdout.readline()
        state: Any = {"w": torch.full((64,), 42.0)}
        dcp.save(state, storage_writer=CheckpointWriter(vault, "run", helper=True))
        time.sleep(0.1)
        thief.stdin.close()
        told = json.loads(thief.stdout.read())
        thief.wait()
        into: Any = {"w": torch.zeros(64)}
        dcp.load(into, storage_reader=CheckpointReader(vault, "run"))
        print(json.dumps({"user": os.getuid(), "loaded": float(into["w"][0]), "told": told}))


if __name__ == "__main__":
    save() if sys.argv[1:] == ["victim"] else steal()
