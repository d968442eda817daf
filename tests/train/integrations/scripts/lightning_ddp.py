"""Lightning's Trainer, whose barrier makes a Gloo group."""

from __future__ import annotations

import logging
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

from tiny_training import DEVICE, ON_CPU, STEPS, batch, model, report

logging.getLogger("lightning").setLevel(logging.ERROR)


class Batches(Dataset[Any]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, step: int) -> Any:
        return batch(step, self.rank)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()
        self.losses: list[float] = []

    def prepare_data(self) -> None:
        """Does nothing; because the method exists, Lightning makes its barrier."""

    def training_step(self, given: Any, _: int) -> Tensor:
        rows, targets = given
        loss = mse_loss(self.net(rows), targets)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(Batches(self.global_rank), batch_size=None)


module = Module()
trainer = lightning.Trainer(
    accelerator=DEVICE, devices=2 if ON_CPU else 1, num_nodes=1 if ON_CPU else 2,
    strategy="ddp", max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    use_distributed_sampler=False,
)  # fmt: skip
trainer.fit(module)
report(module.losses, module.net)
