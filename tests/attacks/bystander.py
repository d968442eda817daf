"""Runs what torch does between processes, in a worker that refuses debuggers.

Run by test_same_user.py, as a user without privileges.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader

from tests.attacks.neighbour import outcome, take_descriptor
from tests.workers import SECRET

ROWS: Final = 64


class Squares:
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((100,), float(index * index))


def double(arrived: Any, answers: Any, parent: int) -> None:
    """Runs in a spawned child: doubles a received tensor in place and sends another back."""
    tensor = arrived.get()
    tensor.mul_(2)
    answers.put(tensor + 1)
    answers.put(outcome(lambda: take_descriptor(parent)))
    arrived.get()  # stay until the parent has it


def exchange(strategy: str) -> str:
    mp.set_sharing_strategy(strategy)
    context = mp.get_context("spawn")
    arrived, answers = context.Queue(), context.Queue()
    child = context.Process(target=double, args=(arrived, answers, os.getpid()))
    child.start()
    tensor = torch.arange(1000.0).share_memory_()
    arrived.put(tensor)
    assert torch.equal(answers.get(timeout=60), torch.arange(1000.0) * 2 + 1)
    assert torch.equal(tensor, torch.arange(1000.0) * 2)  # the same memory
    taken: str = answers.get(timeout=60)
    arrived.put(None)
    child.join(30)
    assert child.exitcode == 0
    return taken


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SEALRING_SECRET"] = SECRET
        store = f"file://{folder}/store"
        dist.init_process_group("sealring", init_method=store, rank=0, world_size=1)
        dist.all_reduce(torch.ones(3))
        loader = DataLoader(Squares(), batch_size=8, num_workers=2, multiprocessing_context="fork")  # type: ignore[arg-type, var-annotated]
        sums = [float(batch.sum()) for batch in loader]
        assert sum(sums) == 100 * sum(i * i for i in range(ROWS))
        taken = {exchange(strategy) for strategy in ("file_descriptor", "file_system")}
        # The project and its tests read these files of their own process.
        for name in ("maps", "smaps", "status", "stat", "fd"):
            path = Path(f"/proc/self/{name}")
            assert list(path.iterdir()) if path.is_dir() else path.read_bytes()
        dist.destroy_process_group()
    print(os.getuid(), *sorted(taken))


if __name__ == "__main__":
    main()
    sys.exit(0)
