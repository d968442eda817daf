"""Lightning's Fabric, whose rank_zero_first makes a Gloo group."""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from torch.nn.functional import mse_loss

from tiny_training import DEVICE, ON_CPU, STEPS, batch, model, report

fabric = Fabric(
    accelerator=DEVICE, devices=2 if ON_CPU else 1, num_nodes=1 if ON_CPU else 2, strategy="ddp"
)
fabric.launch()
with fabric.rank_zero_first():
    net = model()
prepared, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
losses = []
for step in range(STEPS):
    rows, targets = batch(step, fabric.global_rank)
    loss = mse_loss(prepared(rows), targets)
    optimizer.zero_grad()
    fabric.backward(loss)
    optimizer.step()
    losses.append(loss.item())
report(losses, net)
