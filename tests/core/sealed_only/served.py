"""A script of two ranks that asks for plaintext groups in all served ways; prints what it got."""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType


def kind_of(group: Any) -> str:
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2.0, 2.0, 2.0]
    return f"{type(group).__name__} {dist.get_backend(group)}"


def in_a_child(rank: int, meeting: str, results: Any) -> None:
    """Runs in a process that `sealring run` did not start, like a framework's helper."""
    store = dist.FileStore(meeting, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    results.put(kind_of(dist.group.WORLD))
    dist.destroy_process_group()


def main(folder: Path) -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    got = {"no name": kind_of(dist.group.WORLD)}
    for name in ("gloo", "nccl", "cpu:gloo", "cpu:gloo,cuda:nccl", "cpu:sealring,cuda:nccl"):
        got[name] = kind_of(dist.new_group(backend=name))
    # torch's saver starts a process that makes a Gloo group for itself.
    state = {"weight": torch.full((4,), 7.0)}
    saved: Any = dcp.async_save(
        state, checkpoint_id=str(folder), async_checkpointer_type=AsyncCheckpointerType.PROCESS
    )
    saved.result()
    loaded = {"weight": torch.zeros(4)}
    dcp.load(loaded, checkpoint_id=str(folder))
    got["saved by a process"] = str(loaded["weight"].tolist())
    spawn = multiprocessing.get_context("spawn")
    results = spawn.SimpleQueue()
    child = spawn.Process(target=in_a_child, args=(rank, f"{folder}.meeting", results))
    child.start()
    got["a child"] = results.get()
    child.join()
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    got["a second default group"] = kind_of(dist.group.WORLD)
    dist.destroy_process_group()
    if rank == 0:
        print("GOT", json.dumps(got), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
