"""Data parallel: every rank holds the whole model and trains on its share of each batch.

sealring run -n 4 examples/ddp.py
"""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gpt


def train(steps: int, device: str = "cpu") -> list[float]:
    model = DistributedDataParallel(gpt.make_model(device))
    optimizer = gpt.make_optimizer(model.parameters())
    losses = gpt.fit(model, optimizer, steps, dist.get_rank(), dist.get_world_size())
    return gpt.mean_over_ranks(losses)


def main() -> None:
    options = gpt.options(__doc__).parse_args()
    gpt.join(options)
    gpt.report(train(options.steps, device=options.device), as_json=options.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
