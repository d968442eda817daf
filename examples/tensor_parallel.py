"""Tensor parallel: every block's matrices are cut across the ranks, which share every sequence.

sealring run -n 4 examples/tensor_parallel.py
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import gpt

PLAN = {
    "attention.query": ColwiseParallel(),  # heads, one part of them per rank
    "attention.key": ColwiseParallel(),
    "attention.value": ColwiseParallel(),
    "attention.out": RowwiseParallel(),  # ... summed over the ranks
    "mlp.0": ColwiseParallel(),
    "mlp.2": RowwiseParallel(),
}


def cut_blocks(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """The blocks between the embedding and the head, which every rank keeps whole."""
    for block in model[1:-1]:
        parallelize_module(block, mesh, PLAN)


def train(steps: int, device: str = "cpu") -> list[float]:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model = gpt.make_model(device)
    cut_blocks(model, mesh)
    optimizer = gpt.make_optimizer(model.parameters())
    # Not told of rank and world: all ranks see the whole batch.
    return gpt.mean_over_ranks(gpt.fit(model, optimizer, steps))


def main() -> None:
    options = gpt.options(__doc__).parse_args()
    gpt.join(options)
    gpt.report(train(options.steps, device=options.device), as_json=options.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
