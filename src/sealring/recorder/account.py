"""A flight record as plain values: what is written to a file, and what is read back from it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Final, Literal

from sealring.errors import ConfigurationError
from sealring.formats.strict import read_object, strictly

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
class MessageAccount:
    """A send or a receive, as this rank saw it."""

    operation: Literal["send", "recv"]
    peer: int | None
    """The rank of the group at the other end; None while a receive from anyone waits."""
    tag: int
    bytes: int
    dtype: str
    state: Literal["waiting", "done", "failed"]
    posted_ns: int
    ended_ns: int | None
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
    messages: list[MessageAccount]

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
        refusal = ConfigurationError(
            f"{name} is not a flight record; those are named *.flight.json"
        )
        document = read_object(text, refusal)
        if document.pop("format", None) != FORMAT:
            raise refusal
        if (version := document.pop("version", None)) != VERSION:
            raise ConfigurationError(
                f"{name} is a flight record of version {version!r}; this sealring reads {VERSION}"
            )
        account: ProcessAccount = strictly(ProcessAccount, document, name, "flight record")
        return account
