"""Data-parallel training over sealed links: sealring run -n 2 examples/ddp.py

An ordinary DDP script; only the backend's name is sealring's.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import Linear, Sequential, Tanh
from torch.nn.parallel import DistributedDataParallel

STEPS = 100


def main() -> None:
    dist.init_process_group("sealring")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = DistributedDataParallel(Sequential(Linear(16, 64), Tanh(), Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    samples = torch.Generator().manual_seed(1 + rank)  # other samples on every rank
    for step in range(1, STEPS + 1):
        x = torch.randn(32, 16, generator=samples)
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            if rank == 0:
                print(f"step {step:3}  loss {mean.item():.4f}  over {world} ranks")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
