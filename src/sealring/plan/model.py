"""What is trained: its parameters in the order of registration, and its arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    shape: tuple[int, ...]
    uses: float = 1.0
    """How often one sample multiplies with each element in the forward pass: once per token, once
    per place in an image. An embedding that is only looked up has 0."""
    tied: bool = False
    """An embedding that is the output layer too: backward begins with it, yet its gradient is
    whole only at the end."""

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Transformer:
    """What tensor and pipeline parallelism need to know besides."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    parameters: tuple[Parameter, ...]
    transformer: Transformer | None = None
    activation_values: float = 0.0
    """Kept for the backward pass, per sample. 0: not known."""
    extra_flops: float = 0.0
    """Forward, per sample, beyond those of the parameters: attention's own."""
    batch: int = 1
    """Samples per rank unless the user says otherwise."""
    blocks: tuple[tuple[int, int], ...] = field(default=())
    """Parameters [first, last) that are one FSDP unit each; without any, the model is one."""

    @property
    def count(self) -> int:
        return sum(parameter.count for parameter in self.parameters)

    @property
    def forward_flops(self) -> float:
        """Per sample: a multiplication and an addition for each use of each element."""
        return self.extra_flops + sum(2.0 * p.count * p.uses for p in self.parameters)

    def ready_fractions(self) -> list[float]:
        """By parameter, last first: how much of backward has run when its gradient is ready."""
        total = sum(p.count * p.uses for p in self.parameters) or 1.0
        done = sum(p.count * p.uses for p in self.parameters if p.tied)
        fractions = []
        for parameter in reversed(self.parameters):
            done += 0.0 if parameter.tied else parameter.count * parameter.uses
            fractions.append(done / total)
        return fractions
