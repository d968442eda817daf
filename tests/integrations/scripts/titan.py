"""torchtitan: its groups, meshes, gradient clipping and FSDP. Its Trainer needs a GPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torchtitan.tools.utils as tools
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

from tiny_training import ON_CPU, STEPS, batch, model, report

if ON_CPU:  # torchtitan takes a machine without an accelerator for one with CUDA.
    tools.device_type, tools.device_module = "cpu", torch.cpu

from torchtitan.config import CommConfig
from torchtitan.distributed import ParallelDims, utils

world = utils.init_distributed(CommConfig(trace_buf_size=0))
dist.new_group(backend="gloo")  # as its checkpointer makes one for asynchronous saves
dimensions = ParallelDims(
    dp_replicate=1, dp_shard=world, cp=1, tp=1, pp=1, ep=1, world_size=world
)  # fmt: skip
net = fully_shard(model(), mesh=dimensions.get_mesh("dp_shard"))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
losses = []
for step in range(STEPS):
    rows, targets = batch(step, dist.get_rank())
    loss = mse_loss(net(rows), targets)
    optimizer.zero_grad()
    loss.backward()
    utils.clip_grad_norm_(list(net.parameters()), 1.0)
    optimizer.step()
    losses.append(loss.item())
net.unshard()
report(losses, net)
dist.destroy_process_group()
