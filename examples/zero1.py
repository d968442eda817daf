"""ZeRO-1: data parallel, in which each rank holds a part of the optimizer's state.

sealring run -n 4 examples/zero1.py
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import gpt


def train(steps: int, device: str = "cpu") -> list[float]:
    model = DistributedDataParallel(gpt.make_model(device))
    # Each rank updates its part of the parameters and broadcasts them to the others.
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=AdamW, **gpt.OPTIMIZER)
    losses = gpt.fit(model, optimizer, steps, dist.get_rank(), dist.get_world_size())
    return gpt.mean_over_ranks(losses)


def main() -> None:
    options = gpt.options(__doc__).parse_args()
    gpt.join(options)
    gpt.report(train(options.steps, device=options.device), as_json=options.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
