"""A GPT with nothing in it but torch: the demo's over bytes, and GPT-2's own shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Shape:
    """The defaults are the demo's: 0.8 million parameters."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 64
    vocabulary: int = 256
    """One token per byte: no tokenizer to explain, and any source file can be read."""
    attention_bias: bool = False
    """GPT-2 has it, newer models leave it out."""


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
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
    def __init__(self, shape: Shape) -> None:
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
    def __init__(self, shape: Shape) -> None:
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


def make_model(shape: Shape, seed: int) -> GPT:
    """The same weights for the same seed, whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(shape)
