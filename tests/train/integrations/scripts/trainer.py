"""Hugging Face's Trainer."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from tiny_training import ON_CPU, ROWS, STEPS, batch, model, report


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def forward(self, rows: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.net(rows)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        made = [batch(step, rank) for step in range(STEPS) for rank in range(2)]
        self.rows = torch.cat([rows for rows, _ in made]).cpu()
        self.labels = torch.cat([labels for _, labels in made]).cpu()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"rows": self.rows[index], "labels": self.labels[index]}


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=ROWS, learning_rate=0.1,
        use_cpu=ON_CPU, report_to=[], logging_steps=1, save_strategy="no", disable_tqdm=True,
        optim="sgd", lr_scheduler_type="constant", dataloader_num_workers=0,
    )  # fmt: skip
    net = Net()
    trainer: Any = Trainer(net, arguments, train_dataset=Rows())
    trainer.train()
    report([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], net)
