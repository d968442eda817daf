"""Hugging Face's accelerate, which uses only Gloo on CPUs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn.functional import mse_loss

from tiny_training import DEVICE, ON_CPU, STEPS, batch, model, report

accelerator = Accelerator(cpu=ON_CPU)
prepared = accelerator.prepare(model())
optimizer = accelerator.prepare(torch.optim.SGD(prepared.parameters(), lr=0.1))
losses = []
for step in range(STEPS):
    rows, targets = batch(step, accelerator.process_index)
    loss = mse_loss(prepared(rows), targets)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    losses.append(loss.item())
accelerator.gather(torch.tensor(losses, device=DEVICE))
report(losses, accelerator.unwrap_model(prepared))
dist.destroy_process_group()
