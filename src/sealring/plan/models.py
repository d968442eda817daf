"""Where a model comes from: a name, a file that lists its parameters, or `module:factory` of the
user's own, built on the meta device, where parameters have shapes and no memory.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from sealring.errors import ConfigurationError
from sealring.formats.strict import read_json
from sealring.plan.model import Model, Parameter
from sealring.plan.named import MODELS

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
