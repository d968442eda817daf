"""What the workers of the whole run do: train from a vault, save, and go on elsewhere."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sealring.vault import (
    CheckpointReader,
    CheckpointWriter,
    Dataset,
    Loader,
    Stream,
    Vault,
    released_key,
)

RESOURCE = "gpt/key/vault"
LENGTH, HIDDEN, BATCH, SEED = 32, 128, 2, 5


@dataclass
class Told:
    """What one rank reports to the test, through a pipe."""

    losses: list[float] = field(default_factory=list)
    samples: list[bytes] = field(default_factory=list)
    """In the order in which this rank had them."""
    weights: list[bytes] = field(default_factory=list)
    """Of rank 0: the whole state after each step."""
    state: str = ""
    """A digest of the whole state that was saved or loaded."""


class Training:
    def __init__(self, folder: str) -> None:
        torch.manual_seed(7)
        self.vault = Vault.open(Path(folder), released_key(RESOURCE))
        self.model = torch.nn.Sequential(
            torch.nn.Linear(LENGTH, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, LENGTH)
        )
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        packed = Dataset(self.vault, "data", length=LENGTH)
        self.loader = Loader(Stream(packed, batch_size=BATCH, seed=SEED))
        self.told = Told()

    def train(self, steps: int) -> None:
        batches = iter(self.loader)
        for _ in range(steps):
            tokens = next(batches)["tokens"]
            self.told.samples += [sample_bytes(one) for one in tokens]
            inputs = tokens.float() / 65536
            loss = (self.model(inputs) - inputs).pow(2).mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.told.losses.append(float(loss.detach()))
            self.tell_weights()

    def state(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments, "data": self.loader}

    def load(self, reader: Any) -> None:
        state = self.state()
        dcp.load(state, storage_reader=reader)
        set_state_dict(
            self.model, self.optimizer,
            model_state_dict=state["model"], optim_state_dict=state["optimizer"],
        )  # fmt: skip

    def tell_weights(self) -> None:
        found = whole(self.state())
        if dist.get_rank() == 0:
            self.told.weights += [content for _, content in found]

    def tell_state(self) -> None:
        position = self.loader.state_dict()
        self.told.state = hashlib.sha256(repr([whole(self.state()), position]).encode()).hexdigest()


def whole(state: dict[str, Any]) -> list[tuple[str, bytes]]:
    """Every tensor's bytes, gathered from all ranks."""
    flat, _ = flatten_state_dict({name: state[name] for name in ("model", "optimizer")})
    tensors = {name: one for name, one in flat.items() if isinstance(one, torch.Tensor)}
    return [
        (name, (one.full_tensor() if isinstance(one, DTensor) else one).numpy().tobytes())
        for name, one in sorted(tensors.items())
    ]


def train_and_save(rank: int, world: int, folder: str, plain: str, steps: int, more: int) -> Told:
    """Saves after some steps, sealed and with torch's own storage, and trains on."""
    job = Training(folder)
    job.tell_weights()
    job.train(steps)
    job.tell_state()
    dcp.save(job.state(), storage_writer=CheckpointWriter(job.vault, "run"))
    dcp.save(job.state(), storage_writer=FileSystemWriter(plain))
    job.train(more)
    return job.told


def go_on(
    rank: int, world: int, folder: str, plain: str, steps: int, count: int
) -> tuple[Told, Told, list[bytes]]:
    """The same resume twice: from the vault, and from torch's own storage.

    And the first samples of the one order, as a single process that never stopped has them.
    """
    told = []
    for sealed in (True, False):
        job = Training(folder)
        job.train(1)  # so that there is a state to be replaced
        job.told = Told(weights=job.told.weights)
        job.load(CheckpointReader(job.vault, "run") if sealed else FileSystemReader(plain))
        job.tell_state()
        job.train(steps)
        told.append(job.told)
    alone = iter(Stream(Dataset(job.vault, "data", length=LENGTH), seed=SEED, rank=0, world=1))
    return told[0], told[1], [sample_bytes(next(alone)["tokens"]) for _ in range(count)]


def sample_bytes(tokens: torch.Tensor) -> bytes:
    return tokens.numpy().astype("<u2").tobytes()
