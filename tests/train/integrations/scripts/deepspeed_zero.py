"""DeepSpeed, which chooses Gloo for CPUs itself. The argument is the stage of ZeRO."""

from __future__ import annotations

import os
import sys

import deepspeed
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

from tiny_training import DEVICE, ROWS, STEPS, batch, model, report

# The operator that reduces through shared memory takes minutes to compile, and training never calls
# it. In sealed-only mode DeepSpeed must not compile it, even if this script does not say so.
sealed = os.environ.get("SEALRING_ONLY") == "1"
if not sealed:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

stage = int(sys.argv[1])
net = model()
engine, *_ = deepspeed.initialize(
    model=net,
    optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
    config={
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    },
)
losses = []
for step in range(STEPS):
    rows, targets = batch(step, dist.get_rank())
    loss = mse_loss(engine(rows), targets)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
if sealed:
    # For inference DeepSpeed reduces in plaintext through shared memory, if it has the operator for
    # that. Without the operator it reduces in torch's group.
    assert deepspeed.comm.comm.cdb.shm_comm_op is None
    sums = torch.ones(8, device=DEVICE)
    deepspeed.comm.inference_all_reduce(sums)
    assert sums.tolist() == [2.0] * 8
with deepspeed.zero.GatheredParameters(list(net.parameters())) if stage == 3 else torch.no_grad():
    report(losses, net)
dist.destroy_process_group()
