"""A script in the style of nanoGPT: torchrun's variables, DDP, a backend by name."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tiny_training import PLAINTEXT, model, report, train

dist.init_process_group(PLAINTEXT)
net = DistributedDataParallel(model())
report(train(net), net.module)
dist.destroy_process_group()
