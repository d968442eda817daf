"""A tiny model, its data, and what a script prints at the end."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss

STEPS = 4
ROWS = 4
DEVICE = os.environ.get("INTEGRATIONS_DEVICE", "cpu")
ON_CPU = DEVICE == "cpu"
PLAINTEXT = "gloo" if ON_CPU else "nccl"
"""The backend for scripts that must name one."""

if not ON_CPU and "RANK" in os.environ:
    # All ranks share one GPU, and each believes that it is the only rank of its machine. NCCL
    # refuses ranks of one machine that share a GPU, but accepts any name of the machine.
    os.environ |= {"LOCAL_RANK": "0", "NCCL_HOSTID": f"rank-{os.environ['RANK']}"}


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(DEVICE)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(100 * step + rank)
    rows = torch.randn(ROWS, 8, generator=made).to(DEVICE)
    return rows, rows.sum(1, keepdim=True)


def train(net: nn.Module) -> list[float]:
    """Trains as frameworks leave it to the script; returns this rank's losses."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        rows, targets = batch(step, dist.get_rank())
        loss = mse_loss(net(rows), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def result(losses: list[float], weights: nn.Module) -> dict[str, Any]:
    """Returns a rank's results at the end of training, while the groups exist."""
    whole = [
        weight.full_tensor() if isinstance(weight, DTensor) else weight
        for weight in weights.state_dict().values()
    ]
    checksum = sum(weight.double().abs().sum().item() for weight in whole)
    # A "fake" group has one member and sends nothing; torchtitan makes them for unused dimensions.
    sending = [group for group, (name, _) in c10d._world.pg_map.items() if name != "fake"]
    groups = sorted({type(group).__name__ for group in sending})
    return {"losses": losses, "checksum": checksum, "groups": groups}


def report(losses: list[float], weights: nn.Module) -> None:
    """Every rank calls this; the first rank prints its result for the test."""
    found = result(losses, weights)
    if dist.get_rank() == 0:
        print("RESULT", json.dumps(found), flush=True)
