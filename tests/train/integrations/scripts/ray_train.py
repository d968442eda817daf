"""Ray Train, which starts the workers itself, without torchrun."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import ray
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model


def loop(config: dict[str, str]) -> None:
    from tiny_training import model, result, train

    net = prepare_model(model())
    found = result(train(net), net.module)
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
