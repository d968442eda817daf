"""Elastic training: a worker dies, the launcher restarts the job, and it reaches the same loss.

    sealring run -n 4 --max-restarts 3 examples/elastic.py --checkpoint gpt.pt --kill-at 7

With --kill-at, rank 1 kills itself before that step, once. The last printed line is `final loss`,
which equals that of an undisturbed run. --json prints all losses from the first step, the number of
restarts, and the step at which this attempt resumed.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gpt


def train(
    steps: int, checkpoint: Path, kill_at: int | None = None, device: str = "cpu"
) -> tuple[list[float], int]:
    """Returns the losses of all steps, and the step at which this attempt resumed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = gpt.make_model(device)
    optimizer = gpt.make_optimizer(model.parameters())
    losses: list[float] = []
    if checkpoint.exists():
        # Others may have written the file, so only tensors and plain values are loaded.
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        losses = state["losses"]
    resumed_at = len(losses)
    ddp = DistributedDataParallel(model)

    for step in range(resumed_at, steps):
        if step == kill_at and rank == 1 and _restarts() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        inputs, targets = gpt.batch(step, rank, world, device)
        loss = gpt.loss_of(ddp(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses += gpt.mean_over_ranks([loss.detach()])
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            _save({**state, "losses": losses}, checkpoint)
    return losses, resumed_at


def _save(state: dict[str, Any], checkpoint: Path) -> None:
    """Saves atomically: if a worker dies while writing, the previous checkpoint remains."""
    unfinished = checkpoint.with_suffix(".unfinished")
    torch.save(state, unfinished)
    unfinished.replace(checkpoint)


def _restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def main() -> None:
    parser = gpt.options(__doc__)
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="a file that all ranks can read"
    )
    parser.add_argument("--kill-at", type=int, metavar="STEP")
    options = parser.parse_args()
    gpt.join(options)
    losses, resumed_at = train(options.steps, options.checkpoint, options.kill_at, options.device)
    gpt.report(losses, as_json=options.json, restarts=_restarts(), resumed_at=resumed_at)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
