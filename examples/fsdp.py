"""ZeRO-3 (FSDP2): each rank holds a part of the parameters, gradients and optimizer state.

sealring run -n 4 examples/fsdp.py
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gpt


def train(steps: int, device: str = "cpu") -> list[float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device, (world,))
    model = gpt.make_model(device)
    # Block by block, so that only one block is complete on a rank at a time.
    for part in model:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = gpt.make_optimizer(model.parameters())
    return gpt.mean_over_ranks(gpt.fit(model, optimizer, steps, rank, world))


def main() -> None:
    options = gpt.options(__doc__).parse_args()
    gpt.join(options)
    gpt.report(train(options.steps, device=options.device), as_json=options.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
