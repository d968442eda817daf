"""Ray Train, which starts the workers itself, without torchrun."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import ray
import torch
import torch.distributed as dist
from ray import train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch.nn.functional import mse_loss


def loop(config: dict[str, str]) -> None:
    from tiny_training import STEPS, batch, model, result

    net = train.torch.prepare_model(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        rows, targets = batch(step, dist.get_rank())
        loss = mse_loss(net(rows), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = result(losses, net.module)
    if dist.get_rank() == 0:
        Path(config["result"]).write_text(json.dumps(found))


ray.init(
    num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
    configure_logging=False,
)  # fmt: skip
file = Path("result.json").absolute()
trainer = TorchTrainer(
    loop,
    train_loop_config={"result": str(file)},
    torch_config=TorchConfig(backend="gloo"),
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=str(file.parent)),
)
trainer.fit()
print("RESULT", file.read_text())
ray.shutdown()
