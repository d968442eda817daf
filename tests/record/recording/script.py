"""A script that trains with a vault's checkpoints, so that an auditor can repeat any part of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

import sealring
from sealring.record import Share, note_data
from sealring.vault import CheckpointReader, CheckpointWriter, Vault, key_file

STEPS, EVERY, BATCH = 6, 2, 4


def main() -> None:
    vault = Vault.open(Path(sys.argv[1]), key_file(Path(sys.argv[2])))
    torch.manual_seed(0)
    dist.init_process_group("sealring")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = torch.nn.Linear(8, 4)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    with sealring.record_run(every=EVERY, configuration={"lr": 0.01}) as records:
        if records.replay is not None and records.replay.checkpoint is not None:
            name, version = records.replay.checkpoint.split("@")
            state = {"model": model.state_dict(), "optimizer": _filled(optimizer)}
            dcp.load(state, storage_reader=CheckpointReader(vault, name, version=int(version)))
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        for step in records.steps(STEPS):
            generator = torch.Generator().manual_seed(step * world + rank)
            x = torch.randn(BATCH, 8, generator=generator)
            loss = (ddp(x) - x[:, :4]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if os.environ.get("TEST_LIE_AT") == str(step) and records.replay is None:
                model.weight.grad[0, 0] += 1.0  # type: ignore[index]
            optimizer.step()
            first = step * world * BATCH
            share = Share(world * BATCH, rank * BATCH, BATCH)
            note_data("synthetic", "aa" * 32, 0, first, first + world * BATCH, share=share)
            if (step + 1) % EVERY == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                dcp.save(state, storage_writer=CheckpointWriter(vault, "model"))
    dist.destroy_process_group()


def _filled(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return the optimizer's state with a place for every tensor of a checkpoint."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer.state_dict()


if __name__ == "__main__":
    main()
