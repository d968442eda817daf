"""The data keys that a broker gives out: private files, repository/type/tag under one directory."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sealring.core.identity.names import is_resource
from sealring.core.identity.process import read_private
from sealring.errors import BrokerError, BrokerMisconfigured, ConfigurationError, NoSuchResource

_LOG = logging.getLogger("sealring.attest.broker")


@dataclass(frozen=True, slots=True)
class DataKeys:
    directory: Path | None

    def check(self, paths: Iterable[str]) -> None:
        """At the start: raises if a data key is there and cannot be used."""
        for path in paths:
            if self.directory is not None and (self.directory / path).exists():
                read_private(self.directory / path, "the data key", ConfigurationError)

    def read(self, path: str) -> bytes | BrokerError:
        """The data key, or why the broker cannot give it. Raises if it cannot be a data key's."""
        if not is_resource(path):
            raise NoSuchResource("a resource is repository/type/tag")
        if self.directory is None or not (self.directory / path).exists():
            return NoSuchResource(f"the policy grants {path}, and the broker does not have it")
        try:
            return read_private(self.directory / path, "the data key", ConfigurationError)
        except ConfigurationError as problem:
            _LOG.error("%s", problem)
            # Where its files lie is the broker's own matter.
            said = str(problem).replace(str(self.directory / path), path)
            return BrokerMisconfigured(f"the broker cannot use one of its files: {said}")
