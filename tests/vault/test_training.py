"""A job stops on four ranks and goes on with three: as from torch's own checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sealring.vault import CheckpointReader, CheckpointWriter, Vault, keys
from tests.workers import Workers


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(33, 50), torch.nn.ReLU(), torch.nn.Linear(50, 33), torch.nn.LayerNorm(33)
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    inputs = torch.randn(8, 33, generator=torch.Generator().manual_seed(number))
    loss = model(inputs).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": 3}


def opened(folder: str) -> Vault:
    return Vault.open(Path(folder, "vault"), keys.key_file(Path(folder, "vault.key")))


def train_and_stop(rank: int, world: int, folder: str) -> None:
    model, optimizer = made()
    for number in range(3):
        step(model, optimizer, number)
    state = state_of(model, optimizer)
    dcp.save(state, storage_writer=CheckpointWriter(opened(folder), "run"))
    dcp.save(state, storage_writer=FileSystemWriter(Path(folder, "plain")))


def go_on(rank: int, world: int, folder: str, sealed: bool) -> list[float]:
    model, optimizer = made()
    step(model, optimizer, 99)  # so that there is a state to be replaced
    state = state_of(model, optimizer) | {"step": 0}
    reader: Any = CheckpointReader(opened(folder), "run")
    if not sealed:
        reader = FileSystemReader(Path(folder, "plain"))
    dcp.load(state, storage_reader=reader)
    assert state["step"] == 3
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return [step(model, optimizer, number) for number in range(3, 6)]


def test_losses_on_another_world_are_those_of_a_plain_checkpoint(
    vault: Vault, workers: Workers, tmp_path: Path
) -> None:
    workers.run(train_and_stop, str(tmp_path), world=4)
    sealed = workers.run(go_on, str(tmp_path), True, world=3)
    plain = workers.run(go_on, str(tmp_path), False, world=3)
    assert sealed == plain  # to the last bit
    assert len(set(sealed[0])) == 3
