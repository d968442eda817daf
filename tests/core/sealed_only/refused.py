"""A script that tries one plaintext way after the other and prints each error by its name."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.testing._internal.distributed import fake_pg


def group(backend: str) -> Callable[[], Any]:
    return lambda: dist.new_group(backend=backend)


def start(program: str, **environ: str | None) -> Callable[[], Any]:
    changed = {name: value for name, value in {**os.environ, **environ}.items() if value}
    return lambda: subprocess.run([program, "--version"], env=changed, check=True)


def reduce_in_one_shot() -> None:
    torch.ops.symm_mem.one_shot_all_reduce(torch.ones(1), "sum", "0")


def taken_out(tried: Callable[[], Any]) -> Callable[[], Any]:
    def without_the_setting() -> None:
        before = os.environ.copy()
        os.environ.clear()  # accelerate empties the environment for a while, too
        try:
            tried()
        finally:
            os.environ.update(before)

    return without_the_setting


def first_error_of(tried: Callable[[], Any]) -> str:
    try:
        tried()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def main() -> None:
    torchs: Any = torch._C
    assert fake_pg  # the import registers the backend
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    attempts: dict[str, Callable[[], Any]] = {
        "xccl": group("xccl"),
        "mpi": group("mpi"),
        "another device": group("cpu:gloo,xpu:gloo"),
        "Gloo's class": lambda: dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(minutes=1)),
        "rpc": lambda: rpc.init_rpc("worker", rank=0, world_size=1),
        "rpc's agent": lambda: torchs._distributed_rpc.TensorPipeAgent(),
        "symmetric memory": lambda: torchs._distributed_c10d._SymmetricMemory.rendezvous(),
        "symmetric memory's operator": reduce_in_one_shot,
        "symmetric memory's operator without gradients": torch.inference_mode()(reduce_in_one_shot),
        "symmetric memory in C++": lambda: torch.ops.symm_mem._rendezvous(torch.ones(1), "0"),
        "a child without the guard": start(sys.executable, TORCH_DEVICE_BACKEND_AUTOLOAD="0"),
        "a child that is told 0": start(sys.executable, SEALRING_ONLY="0"),
        "another program that is told 0": start("git", SEALRING_ONLY="0"),
        "the guard switched off": lambda: os.environ.update(TORCH_DEVICE_BACKEND_AUTOLOAD="0"),
        "the setting changed": lambda: os.environ.update(SEALRING_ONLY="0"),
        "a group after the setting was taken out": taken_out(group("xccl")),
        "git without the setting": start("git", SEALRING_ONLY=None),
        "a fake group": group("fake"),
    }
    lines = {name: inspect.getsourcelines(tried)[1] for name, tried in attempts.items()}
    errors = {name: first_error_of(tried) for name, tried in attempts.items()}
    print("GOT", json.dumps({"errors": errors, "lines": lines}), flush=True)


if __name__ == "__main__":
    main()
