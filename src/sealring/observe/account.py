"""A flight record as plain values: what is written to a file, and what is read back from it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Final

from sealring.core.engine.flight import GroupAccount
from sealring.errors import ConfigurationError
from sealring.formats.strict import read_object, strictly

FORMAT: Final = "sealring flight record"
VERSION: Final = 1


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
