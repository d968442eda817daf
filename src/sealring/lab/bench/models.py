"""The models of the benchmarks, and a GPT in plain torch, which is the demo's model and GPT-2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from sealring.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a GPT. The defaults are the demo's, with 0.8 million parameters."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 64
    vocabulary: int = 256
    """One token per byte, so that no tokenizer is needed and any file can be read."""
    attention_bias: bool = False
    """Whether attention has biases, as in GPT-2. Newer models have none."""


class Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self._heads = shape.heads
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width, bias=shape.attention_bias)
        self.out = nn.Linear(shape.width, shape.width, bias=shape.attention_bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        query, key, value = (
            part.view(batch, time, self._heads, width // self._heads).transpose(1, 2)
            for part in self.query_key_value(x).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return cast(Tensor, self.out(mixed.transpose(1, 2).reshape(batch, time, width)))


class Block(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.before_mlp = nn.LayerNorm(shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * shape.width, shape.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return cast(Tensor, x + self.mlp(self.before_mlp(x)))


class GPT(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.last = nn.LayerNorm(shape.width)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def logits(self, inputs: Tensor) -> Tensor:
        places = torch.arange(inputs.shape[1], device=inputs.device)
        hidden = self.blocks(self.tokens(inputs) + self.positions(places))
        # The embedding serves as the output layer too, as in GPT-2.
        return functional.linear(self.last(hidden), self.tokens.weight)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss, in nats per token."""
        return functional.cross_entropy(self.logits(inputs).flatten(0, 1), targets.flatten())


def make_model(shape: ModelShape, seed: int) -> GPT:
    """Makes a model whose weights depend only on the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(shape)


# ---- workloads by name: a model, and what one rank trains on in one step


Batch = tuple[Tensor, Tensor]
"""Inputs and targets. The model's forward() takes them and returns the loss."""


@dataclass(frozen=True, slots=True)
class Workload:
    build: Callable[[], nn.Module]
    draw: Callable[[int, Generator], Batch]
    """Draws a batch of the given number of samples."""
    batch: int
    """The default number of samples per rank and step."""
    tokens: int = 0
    """Tokens per sample; 0 if the model has none."""


def build(name: str, seed: int = 0) -> nn.Module:
    """Makes the model on torch's default device. Its weights depend only on the seed, and torch's
    random state does not change."""
    workload = find(name)
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpus = [torch.cuda.current_device()] if initialized else []
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(seed)
        return workload.build()


def find(name: str) -> Workload:
    if name not in MODELS:
        raise ConfigurationError(f"{name!r} is not a model; there is {', '.join(MODELS)}")
    return MODELS[name]


class Classifier(nn.Module):
    """Any network that ends in one logit per class, with its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.network(inputs), targets)


def _language_model(shape: ModelShape, batch: int, tokens: int) -> Workload:
    def draw(count: int, generator: Generator) -> Batch:
        windows = torch.randint(shape.vocabulary, (count, tokens + 1), generator=generator)
        return windows[:, :-1], windows[:, 1:]

    return Workload(lambda: GPT(shape), draw, batch, tokens)


def _gpt2(layers: int, width: int, heads: int) -> Workload:
    """GPT-2 as published (Radford and others, 2019), trained on windows of 128 tokens. A CPU
    computes these in seconds, and the gradients are as large as with windows of 1,024 tokens."""
    shape = ModelShape(layers, width, heads, context=1024, vocabulary=50257, attention_bias=True)
    return _language_model(shape, batch=1, tokens=128)


def _images(network: str, batch: int) -> Workload:
    """A network of torchvision on images of ImageNet's shape: 224 x 224 pixels, 1,000 classes."""

    def make() -> nn.Module:
        return Classifier(cast(nn.Module, getattr(_torchvision(network), network)()))

    def draw(count: int, generator: Generator) -> Batch:
        images = torch.randn(count, 3, 224, 224, generator=generator)
        return images, torch.randint(1000, (count,), generator=generator)

    return Workload(make, draw, batch)


def _torchvision(network: str) -> Any:
    try:
        from torchvision import models  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise ConfigurationError(
            f"{network} is torchvision's, which is not installed: `pip install torchvision` (the "
            f"release for torch {torch.__version__}), or take a model of sealring's own"
        ) from None
    except (RuntimeError, AttributeError) as problem:  # its operators were built for another torch
        raise ConfigurationError(
            f"{network} is torchvision's, which does not fit torch {torch.__version__} "
            f"({problem}): install the release for it, or take a model of sealring's own"
        ) from problem
    return models


def _mlp() -> nn.Module:
    return Classifier(
        nn.Sequential(
            nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
        )
    )


def _digits(count: int, generator: Generator) -> Batch:
    return torch.randn(count, 784, generator=generator), torch.randint(
        10, (count,), generator=generator
    )


MODELS: Final[dict[str, Workload]] = {
    "gpt-demo": _language_model(ModelShape(), batch=8, tokens=64),  # 0.8 million: a quick look
    # 10.8 million parameters, 512 tokens per rank: the shape that tutorials train on Shakespeare,
    # with a batch for CPUs. Larger batches compute longer for the same gradients.
    "gpt-small": _language_model(
        ModelShape(layers=6, width=384, heads=6, context=256), batch=2, tokens=256
    ),
    # 5.8 million parameters and little arithmetic: the hardest kind of model for the links.
    "mlp": Workload(_mlp, _digits, batch=64),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "resnet50": _images("resnet50", batch=4),
    "vgg16": _images("vgg16", batch=2),
}
"""The workloads by the names that `sealring bench step --model` takes."""
