"""What turned some files or datasets into others: docs/transformation-v1.schema.json."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final, Literal

from sealring.errors import ConfigurationError
from sealring.record.provenance.digests import Checked, Named
from sealring.record.provenance.intervals import LAST_TIME, Worker

TRANSFORMATION_TYPE: Final = "https://sealring.github.io/sealring/transformation/v1"

TransformationKind = Literal["ingest", "stage", "export", "evaluation"]


@dataclass(frozen=True, slots=True)
class Parameters(Checked):
    """JSON text, and its SHA-256: two stages with the same digest had the same parameters."""

    text: str
    sha256: str

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if hashlib.sha256(self.text.encode()).hexdigest() != self.sha256:
            raise ConfigurationError("the digest of the parameters is not that of their text")


def parameters_of(value: Any) -> Parameters:
    """In one form for equal values: sorted keys, no spaces."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return Parameters(text, hashlib.sha256(text.encode()).hexdigest())


@dataclass(frozen=True, slots=True)
class Transformation:
    kind: TransformationKind
    name: str
    """Of the stage; unique within a run's folder together with its outputs."""
    inputs: list[Named]
    outputs: list[Named]
    """A digest here is the same one under which the next consumer names its input: a dataset's
    digest, a checkpoint's manifest digest, a file's SHA-256."""
    code: list[Named]
    """Source files or functions that ran, and their digests."""
    parameters: Parameters
    started: int
    """Seconds since 1970."""
    finished: int

    def __post_init__(self) -> None:
        if not self.started <= self.finished <= LAST_TIME:
            raise ConfigurationError("the transformation ends before it starts, or never")
        if not self.outputs:
            raise ConfigurationError("a transformation has at least one output")

    @property
    def subjects(self) -> tuple[Named, ...]:
        return tuple(self.outputs)


@dataclass(frozen=True, slots=True)
class TransformationPredicate:
    worker: Worker | None
    """The signer, where it is a worker; None where an owner's key signed."""
    transformation: Transformation
