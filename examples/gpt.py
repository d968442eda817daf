"""The model, data and training loop of the examples: a small GPT. By itself it trains in one
process:

    python examples/gpt.py

Every example trains the same weights on the same batches, so each prints the same losses as this
one. Only the communication hooks differ, because they round.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY = 6, 64, 4, 32, 256
BATCH = 16
"""Sequences per step, of all ranks together."""


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        places = torch.arange(inputs.shape[1], device=inputs.device)
        return self.tokens(inputs) + self.positions(places)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # -1 heads, because with tensor parallelism a rank has only a part of them.
        query, key, value = (
            part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.before_mlp = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.logits = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


def make_model(device: str = "cpu") -> nn.Sequential:
    """Makes the model: a Sequential of embedding, blocks and head, which a pipeline can split.

    The weights come from the CPU's random numbers, so they are the same on every device.
    """
    torch.manual_seed(0)
    model = nn.Sequential(Embed(), *(Block() for _ in range(LAYERS)), Head())
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    return model.to(device)


OPTIMIZER = {"lr": 2e-3, "betas": (0.9, 0.95), "foreach": False}
"""`foreach` is off: on a GPU torch would put parameters into lists, in which those that tensor
parallelism has split cannot be together with others."""


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **OPTIMIZER)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean loss, in nats per byte."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@cache
def text() -> Tensor:
    """The training text: sources of the Python standard library, one token per byte."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    source = bytearray(b"".join(module.read_bytes() for module in modules))
    return torch.frombuffer(source, dtype=torch.uint8).long()


def batch(
    step: int, rank: int = 0, world: int = 1, device: str | torch.device = "cpu"
) -> tuple[Tensor, Tensor]:
    """One rank's share of a step's batch: (inputs, targets). Targets are shifted by one byte."""
    if BATCH % world:
        raise SystemExit(f"{world} ranks cannot share a batch of {BATCH} equally")
    starts = torch.randint(
        len(text()) - CONTEXT, (BATCH, 1), generator=torch.Generator().manual_seed(step)
    )
    windows = text()[starts + torch.arange(CONTEXT + 1)].chunk(world)[rank].to(device)
    return windows[:, :-1], windows[:, 1:]


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    rank: int = 0,
    world: int = 1,
) -> list[Tensor]:
    """The training loop for any model and optimizer; returns this rank's losses.

    `rank` and `world` choose this rank's share of every batch.
    """
    losses, device = [], next(model.parameters()).device
    for step in range(steps):
        inputs, targets = batch(step, rank, world, device)
        loss = loss_of(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def mean_over_ranks(losses: list[Tensor]) -> list[float]:
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).tolist()


def train(steps: int, device: str = "cpu") -> list[float]:
    """Trains in one process, without torch.distributed. The other examples are compared with it."""
    model = make_model(device)
    return [loss.item() for loss in fit(model, make_optimizer(model.parameters()), steps)]


def options(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", default="sealring", help="to compare with: gloo, plaintext")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def join(options: argparse.Namespace) -> None:
    """Chooses this process's GPU, if it uses one, and joins the process group."""
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(options.backend)


def report(losses: list[float], *, as_json: bool, first: int = 1, **more: Any) -> None:
    """Prints the losses, on rank 0 only, because all ranks have the same."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    if as_json:
        print(json.dumps({"losses": losses, **more}))
        return
    for step, loss in enumerate(losses, first):
        print(f"step {step:3}  loss {loss:.6f}")
    for name, value in more.items():
        print(f"{name.replace('_', ' ')} {value}")
    print(f"final loss {losses[-1]:.6f}")


if __name__ == "__main__":
    chosen = options(__doc__).parse_args()
    report(train(chosen.steps, chosen.device), as_json=chosen.json)
