"""A script in the manner of nanoGPT: torchrun's variables, DDP, a backend by name."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from tiny_training import STEPS, batch, model, report

dist.init_process_group("gloo")
net = DistributedDataParallel(model())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
losses = []
for step in range(STEPS):
    rows, targets = batch(step, dist.get_rank())
    loss = mse_loss(net(rows), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, net.module)
dist.destroy_process_group()
