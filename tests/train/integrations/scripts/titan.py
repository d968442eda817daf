"""torchtitan's own Trainer: a small Llama under FSDP, with checkpoints saved while it trains."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torchtitan.tools.utils as tools
from cpu_as_accelerator import Cpu
from datasets import load_dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.fsdp import FSDPModule

from tiny_training import ON_CPU, STEPS, report

if ON_CPU:  # torchtitan takes a machine without an accelerator for one with CUDA
    tools.device_type, tools.device_module = "cpu", Cpu()
if not hasattr(dist, "set_timeout"):  # older torch versions, up to 2.13, have only the private name
    dist.set_timeout = c10d._set_pg_timeout

from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def write_assets(folder: Path) -> None:
    """Writes a tokenizer of single letters, and lines of letters."""
    numbers = {word: number for number, word in enumerate([BEGIN, END, *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": BEGIN, "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    lines = [" ".join(LETTERS[row * place % 26] for place in range(50)) for row in range(200)]
    (folder / "lines.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))


def settings(folder: Path) -> Trainer.Config:
    DATASETS["lines"] = DatasetConfig(
        path=str(folder / "lines.jsonl"),
        loader=lambda path: load_dataset(
            "json", data_files=path, split="train", cache_dir=str(folder / "cache")
        ),
        sample_processor=lambda sample: sample["text"],
    )
    config = llama3_debugmodel()
    del config.model_spec.model.layers[2:]
    for layer in config.model_spec.model.layers:  # flex attention has no backward pass on CPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.hf_assets_path, config.dump_folder = str(folder), str(folder / "made")
    config.dataloader.dataset = "lines"
    config.training.steps = STEPS
    config.training.local_batch_size, config.training.seq_len = 2, 64
    config.training.mixed_precision_param = "float32"  # many CPUs have no bfloat16
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"  # others need a later torch than 2.13
    config.validator.enable = False
    config.activation_checkpoint = None
    config.comm.trace_buf_size = 0
    config.debug.seed = 1
    config.checkpoint.enable, config.checkpoint.interval = True, 2
    config.checkpoint.async_mode = "async"  # this makes a Gloo group
    return config


with tempfile.TemporaryDirectory() as name:
    write_assets(Path(name))
    trainer = Trainer(settings(Path(name)))
    losses: list[float] = []
    log = trainer.metrics_processor.log

    def keep_and_log(step: int, loss: float, *others: Any, **more: Any) -> None:
        losses.append(loss)
        log(step, loss, *others, **more)

    trainer.metrics_processor.log = keep_and_log
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):  # Gloo has no sum that multiplies first; sealring has
            module.set_force_sum_reduction_for_comms(True)
    trainer.train()
    report(losses, trainer.model_parts[0])
    trainer.close()
    dist.destroy_process_group()
