"""Tensor parallel: the ranks split every block's matrices and work on the same sequences.

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
    "attention.query": ColwiseParallel(),  # each rank has a part of the heads
    "attention.key": ColwiseParallel(),
    "attention.value": ColwiseParallel(),
    "attention.out": RowwiseParallel(),  # summed over the ranks
    "mlp.0": ColwiseParallel(),
    "mlp.2": RowwiseParallel(),
}


def cut_blocks(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """Splits the blocks over the ranks. Every rank keeps the whole embedding and head."""
    for block in model[1:-1]:
        parallelize_module(block, mesh, PLAN)


def train(steps: int, device: str = "cpu") -> list[float]:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model = gpt.make_model(device)
    cut_blocks(model, mesh)
    optimizer = gpt.make_optimizer(model.parameters())
    # Without rank and world, so that all ranks get the whole batch.
    return gpt.mean_over_ranks(gpt.fit(model, optimizer, steps))


def main() -> None:
    options = gpt.options(__doc__).parse_args()
    gpt.join(options)
    gpt.report(train(options.steps, device=options.device), as_json=options.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
