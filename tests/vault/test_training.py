"""A job trains on sealed data, stops on four ranks and goes on with three, as from torch's own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sealring.vault import CheckpointReader, CheckpointWriter, Vault, keys, trees
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


def batches(vault: Vault) -> torch.Tensor:
    """The sealed data, in memory."""
    stored = vault.find("data")
    [part] = stored.manifest.parts
    with stored.copy.opened(part, stored.whose) as reader:
        content = bytearray(reader.length)
        reader.read_into(0, content)
    return torch.frombuffer(content, dtype=torch.float32).reshape(-1, 8, 33)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> float:
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
    data = batches(opened(folder))
    for number in range(3):
        step(model, optimizer, data[number])
    state = state_of(model, optimizer)
    dcp.save(state, storage_writer=CheckpointWriter(opened(folder), "run"))
    dcp.save(state, storage_writer=FileSystemWriter(Path(folder, "plain")))


def go_on(rank: int, world: int, folder: str, sealed: bool) -> tuple[list[float], str]:
    """The losses from there on, and the digest of the state that was loaded."""
    model, optimizer = made()
    data = batches(opened(folder))
    step(model, optimizer, data[9])  # so that there is a state to be replaced
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
    loaded = hashlib.sha256(repr(whole(state)).encode()).hexdigest()
    return [step(model, optimizer, data[number]) for number in range(3, 6)], loaded


def whole(state: dict[str, Any]) -> list[tuple[str, bytes]]:
    """Every tensor's bytes, gathered from all ranks."""
    flat, _ = flatten_state_dict(state)
    tensors = {name: one for name, one in flat.items() if isinstance(one, torch.Tensor)}
    return [
        (name, (one.full_tensor() if isinstance(one, DTensor) else one).numpy().tobytes())
        for name, one in sorted(tensors.items())
    ]


@pytest.fixture
def own_workers() -> Iterator[Workers]:
    """In which no other test has made a mesh: torch keeps them by the names of their groups."""
    started = Workers(4)
    yield started
    started.close()


def test_losses_on_another_world_are_those_of_a_plain_checkpoint(
    vault: Vault, own_workers: Workers, tmp_path: Path
) -> None:
    workers = own_workers
    source = tmp_path / "floats"
    data = torch.randn(10, 8, 33, generator=torch.Generator().manual_seed(1))
    source.write_bytes(data.numpy().tobytes())
    trees.seal_path(vault, source, "data", None, lambda _: None)
    source.unlink()
    workers.run(train_and_stop, str(tmp_path), world=4)
    sealed = workers.run(go_on, str(tmp_path), True, world=3)
    plain = workers.run(go_on, str(tmp_path), False, world=3)
    assert sealed == plain  # to the last bit
    losses, _ = sealed[0]
    assert len(set(losses)) == 3
