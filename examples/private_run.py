"""A run that is private from its data to its model: data, messages and checkpoints are sealed.

    sealring run -n 4 examples/private_run.py --vault my-vault --key my.key

The vault holds the sealed data as the object `corpus`. Each worker opens the data in its memory and
trains. Every few steps all workers save a sealed checkpoint, which each of them signs. A run that
starts again resumes from the newest checkpoint, also with another number of workers. docs/vault.md
has the commands that come before and after it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import gpt
from sealring.errors import NoSuchObject
from sealring.vault import CheckpointReader, CheckpointWriter, Vault, key_file, released_key

DATA, CHECKPOINT = "corpus", "gpt"


def tokens(vault: Vault) -> torch.Tensor:
    """Opens the sealed object in this process's memory. No plaintext is written to a disk."""
    stored = vault.find(DATA)
    [part] = stored.manifest.parts
    with stored.copy.opened(part, stored.whose) as reader:
        content = bytearray(reader.length)
        reader.read_into(0, content)
    return torch.frombuffer(content, dtype=torch.uint8).long()


def batch(data: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of a batch, which depends only on the step, also in a resumed run."""
    rank, world = dist.get_rank(), dist.get_world_size()
    made = torch.Generator().manual_seed(step)
    starts = torch.randint(len(data) - gpt.CONTEXT, (gpt.BATCH, 1), generator=made)
    windows = data[starts + torch.arange(gpt.CONTEXT + 1)].chunk(world)[rank]
    return windows[:, :-1], windows[:, 1:]


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step}


def resume(vault: Vault, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads the newest checkpoint, if there is one; returns the step at which training resumes."""
    try:
        vault.find(CHECKPOINT)
    except NoSuchObject:
        return 0
    state = state_of(model, optimizer, 0)
    dcp.load(state, storage_reader=CheckpointReader(vault, CHECKPOINT))
    set_state_dict(
        model, optimizer,
        model_state_dict=state["model"], optim_state_dict=state["optimizer"],
    )  # fmt: skip
    return int(state["step"])


def main() -> None:
    parser = gpt.options(__doc__)
    parser.add_argument("--vault", required=True, help="its directory, or its URL in a store")
    parser.add_argument("--key", type=Path, help="its key file; else the broker releases the key")
    parser.add_argument("--resource", default="gpt/key/vault", help="the broker's name of the key")
    parser.add_argument("--save-every", type=int, default=5, metavar="STEPS")
    options = parser.parse_args()
    gpt.join(options)
    key = key_file(options.key) if options.key else released_key(options.resource)
    vault = Vault.open(options.vault, key)
    data = tokens(vault)
    model = gpt.make_model()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = gpt.make_optimizer(model.parameters())
    start = resume(vault, model, optimizer)
    losses = []
    for step in range(start, options.steps):
        inputs, targets = batch(data, step)
        loss = gpt.loss_of(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses += gpt.mean_over_ranks([loss.detach()])
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            state = state_of(model, optimizer, step + 1)
            dcp.save(state, storage_writer=CheckpointWriter(vault, CHECKPOINT, keep=3))
    if losses:
        told = {"resumed_at": start, "workers": dist.get_world_size()}
        gpt.report(losses, as_json=options.json, first=start + 1, **told)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
