"""The planner's models: parameters in the order of registration, and their arithmetic.

A model has a known name, or comes from a file that lists its parameters, or from the user's own
`module:factory`. The latter is built on the meta device, where parameters need no memory.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
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
    """Whether it is an embedding that is also the output layer. Backward begins with it, but its
    gradient is complete only at the end."""

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Transformer:
    """The shape of a transformer, which tensor and pipeline parallelism need."""

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
    """Values per sample that are kept for the backward pass; 0 if not known."""
    extra_flops: float = 0.0
    """Forward flops per sample beyond those of the parameters, such as attention's."""
    batch: int = 1
    """The default number of samples per rank."""
    blocks: tuple[tuple[int, int], ...] = field(default=())
    """The FSDP units, as ranges [first, last) of parameters; if empty, the model is one unit."""

    @property
    def count(self) -> int:
        return sum(parameter.count for parameter in self.parameters)

    @property
    def forward_flops(self) -> float:
        """Flops per sample: a multiplication and an addition for each use of each element."""
        return self.extra_flops + sum(2.0 * p.count * p.uses for p in self.parameters)

    def ready_fractions(self) -> list[float]:
        """For each parameter, last first: the part of backward after which its gradient is
        ready."""
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
    """Loads a model by its name, by `module:factory`, or from the file of a parameter list."""
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
    """Reads a JSON list of parameters in the order of registration.

    It is {name: [dimensions]}, or {name: {"shape": [dimensions], "uses": n}}, or a list of such
    shapes. It is the whole document, or the member "parameters" beside "batch" and
    "activation_values" (`Model`).
    """
    try:
        return _read(path)
    except OSError as problem:
        raise ConfigurationError(f"{path} cannot be read: {problem.strerror}") from problem


def _read(path: Any) -> Model:
    with path.open("rb") as file:
        content = file.read(_MAX_FILE_BYTES + 1)
    try:
        document = read_json(content, _MAX_FILE_BYTES)
    except ValueError:
        raise ConfigurationError(
            f'{path} is not a JSON list of parameters: write {{"layer.weight": [512, 512], ...}}'
        ) from None
    whole = isinstance(document, dict) and isinstance(document.get("parameters"), dict | list)
    listed = document.pop("parameters") if whole else document
    about = document if whole else {}
    if isinstance(listed, list):
        listed = {str(number): shape for number, shape in enumerate(listed)}
    if not isinstance(listed, dict) or not listed:
        raise ConfigurationError(f"{path} lists no parameters")
    if not set(about) <= {"batch", "activation_values"} or not all(map(_is_count, about.values())):
        raise ConfigurationError(
            f"{path}: beside the parameters are batch and activation_values, whole numbers"
        )
    parameters = tuple(_listed(path, name, shape) for name, shape in listed.items())
    return Model(Path(path.name).stem, parameters, blocks=_blocks(parameters), **about)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 40


def _listed(path: Any, name: str, given: Any) -> Parameter:
    shape, uses = given, 1
    if isinstance(given, dict) and given.keys() == {"shape", "uses"}:
        shape, uses = given["shape"], given["uses"]
    sizes = isinstance(shape, list) and all(map(_is_count, [*shape, uses]))
    if not sizes or math.prod(shape) >= 1 << 48:
        raise ConfigurationError(f"{path}: {name} has no shape: write its dimensions, [512, 512]")
    return Parameter(name, tuple(shape), float(uses))


def from_factory(name: str) -> Model:
    """Makes a model by `module:factory`, a callable without arguments that returns a Module."""
    import torch

    module_name, _, factory_name = name.partition(":")
    here = os.getcwd()
    sys.path.insert(0, here)  # as with `python -m`, to find the user's module
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
    """Makes a model from a torch.nn.Module. As in DDP, only parameters that are trained count."""
    trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    if not trained:
        raise ConfigurationError(f"{name} has no parameters to train")
    parameters = tuple(Parameter(n, tuple(p.shape)) for n, p in trained)
    return Model(name, parameters, blocks=_blocks(parameters))


def with_tokens(model: Model, tokens: int) -> Model:
    """Returns a user's model in which each sample uses every parameter `tokens` times."""
    if model.name in MODELS:
        raise ConfigurationError(
            f"--tokens is for models of your own: what {model.name} computes is known"
        )
    if not 1 <= tokens <= 1 << 40:
        raise ConfigurationError(f"{tokens} tokens in a sample: there is at least one")
    parameters = tuple(dataclasses.replace(p, uses=float(tokens)) for p in model.parameters)
    return dataclasses.replace(model, parameters=parameters)


def _blocks(parameters: Sequence[Parameter]) -> tuple[tuple[int, int], ...]:
    """Ranges of consecutive parameters that belong together by name, such as `layers.7.`, `head.`.

    Users usually wrap each such block in FSDP.
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


# ---- the known models, with the shapes of lab/bench/models.py; tests compare the two


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


def _shipped(name: str) -> Callable[[], Model]:
    """A model of torchvision, with the arithmetic of 224 x 224 pixels; `mlp` is the benchmark's."""
    return lambda: _read(files("sealring.lab.plan").joinpath("figures", "models", f"{name}.json"))


MODELS: Final[dict[str, Callable[[], Model]]] = {
    "gpt2": _gpt2("gpt2", 12, 768, 12),
    "gpt2-medium": _gpt2("gpt2-medium", 24, 1024, 16),
    "gpt2-large": _gpt2("gpt2-large", 36, 1280, 20),
    "gpt2-xl": _gpt2("gpt2-xl", 48, 1600, 25),
    "resnet50": _shipped("resnet50"),
    "vgg16": _shipped("vgg16"),
    "mlp": _shipped("mlp"),
    "gpt-small": lambda: _gpt("gpt-small", 6, 384, 6, 256, 256, 256, attention_bias=False, batch=2),
    "gpt-demo": lambda: _gpt("gpt-demo", 4, 128, 4, 64, 256, 64, attention_bias=False, batch=8),
}
"""The models by the names that `sealring plan` takes."""
