"""A script in the style of nanoGPT.

It uses torchrun's variables, accumulates gradients under DDP without synchronisation, clips them,
and averages the loss over the ranks.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

from tiny_training import DEVICE, PLAINTEXT, STEPS, report

backend = PLAINTEXT
gradient_accumulation_steps = 2 * int(os.environ["WORLD_SIZE"])
vocabulary, block = 16, 8

dist.init_process_group(backend=backend)
ddp_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
gradient_accumulation_steps //= ddp_world_size
torch.manual_seed(1337)
raw_model = nn.Sequential(
    nn.Embedding(vocabulary, 32),
    nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True),
    nn.LayerNorm(32),
    nn.Linear(32, vocabulary),
).to(DEVICE)
model = DDP(raw_model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
data = torch.Generator().manual_seed(1337 + ddp_rank)
losses = []
for _ in range(STEPS):
    for micro_step in range(gradient_accumulation_steps):
        tokens = torch.randint(vocabulary, (4, block + 1), generator=data).to(DEVICE)
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        logits = model(tokens[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        (loss / gradient_accumulation_steps).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    mean = loss.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.SUM)
    losses.append(mean.item() / ddp_world_size)
report(losses, raw_model)
dist.destroy_process_group()
