"""What is trained: its parameters in the order of registration, its arithmetic, and its origin.

A model has a name, or comes from a file that lists its parameters, or is `module:factory` of the
user's own, built on the meta device, where parameters have shapes and no memory.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sealring.errors import ConfigurationError
from sealring.formats.strict import read_json


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


# ---- by name, from a file, from a factory


_MAX_FILE_BYTES: Final = 64 << 20


def load_model(name: str) -> Model:
    """By name, `module:factory`, or the path of a parameter list; ConfigurationError if neither."""
    if name in MODELS:
        return MODELS[name]()
    if name.endswith(".json") or os.sep in name:
        return from_file(Path(name))
    if ":" in name:
        return from_factory(name)
    raise ConfigurationError(
        f"{name!r} is not a model; there is {', '.join(MODELS)}, a parameter list (a .json file), "
        "or module:factory of your own"
    )


def from_file(path: Path) -> Model:
    """A JSON object {name: [dimensions]} in the order of registration, or a list of such lists."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as problem:
        raise ConfigurationError(f"{path} cannot be read: {problem.strerror}") from problem
    try:
        listed = read_json(content, _MAX_FILE_BYTES)
    except ValueError:
        raise ConfigurationError(
            f'{path} is not a JSON list of parameters: write {{"layer.weight": [512, 512], ...}}'
        ) from None
    if isinstance(listed, list):
        listed = {str(number): shape for number, shape in enumerate(listed)}
    if not isinstance(listed, dict) or not listed:
        raise ConfigurationError(f"{path} lists no parameters")
    parameters = tuple(_listed(path, name, shape) for name, shape in listed.items())
    return Model(path.stem, parameters, blocks=_blocks(parameters))


def _listed(path: Path, name: str, shape: Any) -> Parameter:
    sizes = isinstance(shape, list) and all(type(n) is int and 0 < n < 1 << 40 for n in shape)
    if not sizes or math.prod(shape) >= 1 << 48:
        raise ConfigurationError(f"{path}: {name} has no shape: write its dimensions, [512, 512]")
    return Parameter(name, tuple(shape))


def from_factory(name: str) -> Model:
    """`module:factory`: a callable without arguments that returns a torch.nn.Module."""
    import torch

    module_name, _, factory_name = name.partition(":")
    here = os.getcwd()
    sys.path.insert(0, here)  # as `python -m` has it: the user's own module
    try:
        factory: Any = importlib.import_module(module_name)
        for part in factory_name.split("."):
            factory = getattr(factory, part)
        with torch.device("meta"):
            module = factory()
    except Exception as problem:
        raise ConfigurationError(
            f"{name} made no model: {type(problem).__name__}: {problem}. It must be a function "
            "without arguments that returns a torch.nn.Module"
        ) from problem
    finally:
        sys.path.remove(here)
    if not isinstance(module, torch.nn.Module):
        raise ConfigurationError(f"{name} returned a {type(module).__name__}, no torch.nn.Module")
    return from_module(module, name)


def from_module(module: Any, name: str) -> Model:
    """Any torch.nn.Module; only what takes part in training counts, as in DDP."""
    trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    if not trained:
        raise ConfigurationError(f"{name} has no parameters to train")
    parameters = tuple(Parameter(n, tuple(p.shape)) for n, p in trained)
    return Model(name, parameters, blocks=_blocks(parameters))


def with_tokens(model: Model, tokens: int) -> Model:
    """A model of the user's own, in which each sample uses every parameter so many times."""
    if model.name in MODELS:
        raise ConfigurationError(
            f"--tokens is for models of your own: what {model.name} computes is known"
        )
    if not 1 <= tokens <= 1 << 40:
        raise ConfigurationError(f"{tokens} tokens in a sample: there is at least one")
    parameters = tuple(dataclasses.replace(p, uses=float(tokens)) for p in model.parameters)
    return dataclasses.replace(model, parameters=parameters)


def _blocks(parameters: Sequence[Parameter]) -> tuple[tuple[int, int], ...]:
    """Parameters that follow each other and belong together by their names: `layers.7.`, `head.`.

    People wrap such blocks in FSDP one by one.
    """
    found: list[tuple[int, int]] = []
    before = None
    for index, parameter in enumerate(parameters):
        parts = parameter.name.split(".")
        number = next((place for place, part in enumerate(parts) if part.isdigit()), 0)
        prefix = parts[: number + 1]
        if prefix == before:
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index, index + 1))
        before = prefix
    return tuple(found)


# ---- the models that have a name, with the shapes of lab/bench/models.py; the tests compare them


def _gpt(
    name: str, layers: int, width: int, heads: int, context: int, vocabulary: int, tokens: int,
    *, attention_bias: bool, batch: int,
) -> Model:  # fmt: skip
    used = float(tokens)

    def linear(prefix: str, out: int, into: int, bias: bool = True) -> Iterator[Parameter]:
        yield Parameter(f"{prefix}.weight", (out, into), used)
        if bias:
            yield Parameter(f"{prefix}.bias", (out,), used)

    parameters = [
        Parameter("tokens.weight", (vocabulary, width), used, tied=True),
        Parameter("positions.weight", (context, width), 0.0),
    ]
    blocks = [(0, 2)]
    for layer in range(layers):
        start, at = len(parameters), f"blocks.{layer}"
        parameters += [Parameter(f"{at}.before_attention.{p}", (width,), used) for p in _NORM]
        parameters += linear(f"{at}.attention.query_key_value", 3 * width, width, attention_bias)
        parameters += linear(f"{at}.attention.out", width, width, attention_bias)
        parameters += [Parameter(f"{at}.before_mlp.{p}", (width,), used) for p in _NORM]
        parameters += linear(f"{at}.mlp.0", 4 * width, width)
        parameters += linear(f"{at}.mlp.2", width, 4 * width)
        blocks.append((start, len(parameters)))
    parameters += [Parameter(f"last.{p}", (width,), used) for p in _NORM]
    blocks.append((len(parameters) - 2, len(parameters)))
    return Model(
        name,
        tuple(parameters),
        Transformer(layers, width, heads, tokens, vocabulary),
        # 34 bytes per token, width and layer at 2 bytes a value, with attention that is not kept
        # (Korthikanti and others, arXiv 2205.05198, table 2), and the logits.
        activation_values=tokens * (17.0 * width * layers + 2.0 * vocabulary),
        extra_flops=4.0 * layers * tokens * tokens * width,
        batch=batch,
        blocks=tuple(blocks),
    )


_NORM: Final = ("weight", "bias")


def _gpt2(name: str, layers: int, width: int, heads: int) -> Callable[[], Model]:
    return lambda: _gpt(name, layers, width, heads, 1024, 50257, 1024, attention_bias=True, batch=1)


def _conv(name: str, into: int, out: int, kernel: int, side: int, bias: bool) -> list[Parameter]:
    """A convolution whose output is `side` x `side`."""
    found = [Parameter(f"{name}.weight", (out, into, kernel, kernel), float(side * side))]
    return [*found, Parameter(f"{name}.bias", (out,), float(side * side))] if bias else found


def _batch_norm(name: str, width: int, side: int) -> list[Parameter]:
    return [Parameter(f"{name}.{p}", (width,), float(side * side)) for p in _NORM]


def _resnet50() -> Model:
    """As torchvision registers it; 224 x 224 pixels."""
    parameters = [*_conv("conv1", 3, 64, 7, 112, False), *_batch_norm("bn1", 64, 112)]
    blocks = [(0, len(parameters))]
    kept, into, side = 2 * 64 * 112.0**2, 64, 56
    for stage, (count, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        for number in range(count):
            start, at = len(parameters), f"layer{stage}.{number}"
            before = side
            if number == 0 and stage > 1:
                side //= 2
            # The stride is in the second convolution, so the first works at the earlier size.
            for place, (a, b, kernel, size) in enumerate(
                ((into, width, 1, before), (width, width, 3, side), (width, 4 * width, 1, side)),
                start=1,
            ):
                parameters += _conv(f"{at}.conv{place}", a, b, kernel, size, False)
                parameters += _batch_norm(f"{at}.bn{place}", b, size)
                kept += 2.0 * b * size * size
            if number == 0:
                parameters += _conv(f"{at}.downsample.0", into, 4 * width, 1, side, False)
                parameters += _batch_norm(f"{at}.downsample.1", 4 * width, side)
                kept += 2.0 * 4 * width * side * side
            into = 4 * width
            blocks.append((start, len(parameters)))
    parameters += [Parameter("fc.weight", (1000, 2048)), Parameter("fc.bias", (1000,))]
    blocks.append((len(parameters) - 2, len(parameters)))
    return Model(
        "resnet50", tuple(parameters), activation_values=kept, batch=32, blocks=tuple(blocks)
    )


def _vgg16() -> Model:
    """As torchvision registers it; 224 x 224 pixels."""
    parameters: list[Parameter] = []
    into, side, place, kept = 3, 224, 0, 0.0
    for count, width in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(count):
            parameters += _conv(f"features.{place}", into, width, 3, side, True)
            kept += 2.0 * width * side * side
            into, place = width, place + 2
        side, place = side // 2, place + 1
    for place, (out, width) in zip(
        (0, 3, 6), ((4096, 25088), (4096, 4096), (1000, 4096)), strict=True
    ):
        parameters += [
            Parameter(f"classifier.{place}.weight", (out, width)),
            Parameter(f"classifier.{place}.bias", (out,)),
        ]
    blocks = tuple((first, first + 2) for first in range(0, len(parameters), 2))
    return Model("vgg16", tuple(parameters), activation_values=kept, batch=32, blocks=blocks)


def _mlp() -> Model:
    parameters: list[Parameter] = []
    for place, (out, into) in zip((0, 2, 4), ((2048, 784), (2048, 2048), (10, 2048)), strict=True):
        parameters += [
            Parameter(f"network.{place}.weight", (out, into)),
            Parameter(f"network.{place}.bias", (out,)),
        ]
    return Model("mlp", tuple(parameters), activation_values=2.0 * 4106 + 784, batch=64)


MODELS: Final[dict[str, Callable[[], Model]]] = {
    "gpt2": _gpt2("gpt2", 12, 768, 12),
    "gpt2-medium": _gpt2("gpt2-medium", 24, 1024, 16),
    "gpt2-large": _gpt2("gpt2-large", 36, 1280, 20),
    "gpt2-xl": _gpt2("gpt2-xl", 48, 1600, 25),
    "resnet50": _resnet50,
    "vgg16": _vgg16,
    "mlp": _mlp,
    "gpt-small": lambda: _gpt("gpt-small", 6, 384, 6, 256, 256, 256, attention_bias=False, batch=2),
    "gpt-demo": lambda: _gpt("gpt-demo", 4, 128, 4, 64, 256, 64, attention_bias=False, batch=8),
}
"""By the name that `sealring plan` takes."""
