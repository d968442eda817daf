"""A stage of a pipeline: a pure function from samples to samples, with its code and parameters.

The code is the text of the file that defines the function. Every process runs this text, so the
recorded code is the code that ran.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from sealring.errors import BadSource, ConfigurationError, named
from sealring.formats.strict import read_json
from sealring.vault.datasets.fields import Field, decoder, encoder, fields_of
from sealring.vault.datasets.shards import ShardReader

_NAME: Final = re.compile(r"[\w.-]{1,100}")


@dataclass(frozen=True)
class Stage:
    """Makes the dataset `name` from the dataset `of`.

    `function` is called with a sample and the parameters. It returns a sample, or None to leave the
    sample out, or an iterable of samples. `fields` gives the kinds of a returned sample's fields.
    """

    name: str
    of: str
    function: Callable[..., Any]
    fields: Mapping[str, str]
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            raise ConfigurationError(f"{self.name[:50]!r} cannot be the name of a stage")
        if self.name == self.of:
            raise ConfigurationError(f"the stage {self.name!r} is made of itself")
        fields_of(dict(self.fields))
        try:
            json.dumps(dict(self.parameters), allow_nan=False)
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"the parameters of the stage {self.name!r} are not JSON: they are recorded"
            ) from None


@dataclass(frozen=True, slots=True)
class Recorded:
    """A stage as JSON. A process runs the stage from it; the dataset's index keeps its recipe."""

    code: str
    """The text of the file that defines the function."""
    function: str
    parameters: str
    """JSON, with sorted keys."""
    reads: list[Field]
    fields: list[Field]

    @property
    def recipe(self) -> str:
        return canonical(
            {
                "stage": self.function,
                "code": {"sha256": _sha256(self.code), "text": self.code},
                "parameters": read_json(self.parameters),
                "reads": [asdict(one) for one in self.reads],
                "fields": [asdict(one) for one in self.fields],
            }
        )


def recorded(stage: Stage, reads: list[Field]) -> Recorded:
    name = stage.function.__qualname__
    code = stage.function.__globals__.get(CODE)
    path = None if code else inspect.getsourcefile(stage.function)
    if "<" in name or "." in name or not (code or path):
        raise ConfigurationError(
            f"the function of the stage {stage.name!r} must stand by itself in a file: its code is "
            "recorded"
        )
    code = code or Path(str(path)).read_text()
    parameters = canonical(dict(stage.parameters))
    return Recorded(code, name, parameters, reads, fields_of(dict(stage.fields)))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def canonical(document: Any) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


CODE: Final = "__sealring_code__"
"""The name under which a module made by `module_of` keeps its text."""


@lru_cache(maxsize=16)
def module_of(code: str, path: str) -> types.ModuleType:
    """Runs the text of a file as a module."""
    module = types.ModuleType("sealring_pipeline")
    module.__file__ = path
    setattr(module, CODE, code)
    exec(compile(code, path, "exec"), module.__dict__)  # noqa: S102  (the user's own stages)
    return module


def stage_samples(order: dict[str, Any], reader: ShardReader) -> Iterator[bytes]:
    """Yields the encoded samples that a stage makes from a shard."""
    reads, fields = ([Field(**one) for one in order[name]] for name in ("reads", "fields"))
    decode, encode = decoder(reads), encoder(fields)
    parameters = read_json(order["parameters"])
    try:
        function = getattr(module_of(order["code"], "<pipeline>"), order["function"])
    except Exception as problem:
        raise BadSource(
            f"the code of {order['function']} does not run: {problem!r}", code="vault.stage_failed"
        ) from problem
    for number, sample in enumerate(reader.samples()):
        where = f"{order['function']}: sample {number} of {reader.shard.part}"
        try:
            for made in _several(function(decode(sample), **parameters)):
                yield encode(made)
        except BadSource as problem:
            raise BadSource(
                f"{where}: what it returned is not in its fields: {problem}",
                code="vault.stage_failed",
            ) from None
        except Exception as problem:
            raise BadSource(f"{where}: {problem!r}", code="vault.stage_failed") from problem


def _several(made: Any) -> Iterator[dict[str, Any]]:
    if made is None:
        return
    for one in [made] if isinstance(made, dict) else made:
        if not isinstance(one, dict):
            raise BadSource(f"a sample is a dict, and not {named(one)}")
        yield one
