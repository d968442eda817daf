"""A flight record as plain values: what is written to a file, and what is read back from it."""

from __future__ import annotations

import dataclasses
import json
import types
from dataclasses import dataclass
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from sealring.errors import ConfigurationError

FORMAT: Final = "sealring flight record"
VERSION: Final = 1

State = Literal["queued", "running", "done", "failed"]


@dataclass(frozen=True, slots=True)
class CollectiveAccount:
    """Times are nanoseconds since 1970 by this host's clock; None where it has not come to that."""

    number: int | None
    """As all ranks of the group count; None while it waits its turn."""
    operation: str
    algorithm: str
    bytes: int | None
    dtype: str
    reduction: str | None
    root: int | None
    state: State
    queued_ns: int
    started_ns: int | None
    ended_ns: int | None
    sealed_bytes: int
    opened_bytes: int
    error: str | None
    """The exception's class and text."""


@dataclass(frozen=True, slots=True)
class GroupAccount:
    id: str
    """The same on all ranks, and of no other group: not of a later one with this name either."""
    name: str
    rank: int
    """Within the group."""
    members: list[int]
    """The job's ranks in the order of the group's."""
    state: Literal["open", "failed", "closed"]
    sealed_bytes: int
    opened_bytes: int
    rekeys: int
    waited_s: list[float]
    """By rank of the group."""
    collectives: list[CollectiveAccount]

    def collective(self, number: int) -> CollectiveAccount | None:
        """What collective `number` was on this rank, if it is not too long ago."""
        return next((each for each in self.collectives if each.number == number), None)


@dataclass(frozen=True, slots=True)
class ProcessAccount:
    job: str
    rank: int
    host: str
    pid: int
    written_ns: int
    groups: list[GroupAccount]

    def to_json(self) -> str:
        head = {"format": FORMAT, "version": VERSION}
        return json.dumps({**head, **dataclasses.asdict(self)}, indent=1)

    @staticmethod
    def from_json(text: str | bytes, name: str) -> ProcessAccount:
        """Reads back what to_json wrote; `name` is what an error calls it."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            raise ConfigurationError(f"{name} is not JSON, so it is no flight record") from None
        if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
            raise ConfigurationError(
                f"{name} is not a flight record; those are named *.flight.json"
            )
        if (version := document.pop("version", None)) != VERSION:
            raise ConfigurationError(
                f"{name} is a flight record of version {version!r}; this sealring reads {VERSION}"
            )
        account: ProcessAccount = _value(ProcessAccount, document, name)
        return account


def _value(wanted: Any, value: Any, where: str) -> Any:
    """`value` as the type `wanted`, or an error that says where it is something else."""
    origin = get_origin(wanted)
    if dataclasses.is_dataclass(wanted) and isinstance(value, dict):
        hints = get_type_hints(wanted)
        if value.keys() == hints.keys():
            kind: Any = wanted
            return kind(**{key: _value(hints[key], value[key], f"{where}: {key}") for key in hints})
    elif origin is list and isinstance(value, list):
        (item,) = get_args(wanted)
        return [_value(item, each, f"{where}[{index}]") for index, each in enumerate(value)]
    elif origin is Literal and isinstance(value, str) and value in get_args(wanted):
        return value
    elif origin in (Union, types.UnionType):
        present, _ = get_args(wanted)
        return None if value is None else _value(present, value, where)
    elif wanted is str and type(value) is str:
        return value
    elif wanted in (int, float) and type(value) is wanted and 0 <= value < 1 << 63:
        return value  # a NaN is not between any two numbers
    raise ConfigurationError(f"{where} is not what a flight record has there")
