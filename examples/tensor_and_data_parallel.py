"""Tensor parallel inside a group of ranks, data parallel between the groups: a 2-D mesh.

sealring run -n 4 examples/tensor_and_data_parallel.py
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gpt
from tensor_parallel import cut_blocks


def train(steps: int, tensor_ranks: int = 2, device: str = "cpu") -> list[float]:
    mesh = init_device_mesh(
        device,
        (dist.get_world_size() // tensor_ranks, tensor_ranks),
        mesh_dim_names=("data", "tensor"),
    )
    model = gpt.make_model(device)
    cut_blocks(model, mesh["tensor"])
    # A rank's part of a block is split again between the groups.
    for part in model:
        fully_shard(part, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = gpt.make_optimizer(model.parameters())
    # Ranks that share a tensor share their sequences; the groups do not.
    losses = gpt.fit(model, optimizer, steps, mesh["data"].get_local_rank(), mesh["data"].size())
    return gpt.mean_over_ranks(losses)


def main() -> None:
    parser = gpt.options(__doc__)
    parser.add_argument("--tensor-ranks", type=int, default=2, help="ranks that share a matrix")
    options = parser.parse_args()
    gpt.join(options)
    gpt.report(
        train(options.steps, options.tensor_ranks, device=options.device), as_json=options.json
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
