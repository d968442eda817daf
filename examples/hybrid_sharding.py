"""Hybrid sharding: FSDP2 inside a group of ranks (such as a machine), replicas between groups.

sealring run -n 4 examples/hybrid_sharding.py
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gpt


def train(steps: int, replicas: int = 2, device: str = "cpu") -> list[float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(
        device, (replicas, world // replicas), mesh_dim_names=("replicate", "shard")
    )
    model = gpt.make_model(device)
    for part in model:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = gpt.make_optimizer(model.parameters())
    return gpt.mean_over_ranks(gpt.fit(model, optimizer, steps, rank, world))


def main() -> None:
    parser = gpt.options(__doc__)
    parser.add_argument("--replicas", type=int, default=2, help="they divide the number of ranks")
    options = parser.parse_args()
    gpt.join(options)
    gpt.report(train(options.steps, options.replicas, device=options.device), as_json=options.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
