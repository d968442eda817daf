"""Job names, ranks, and the URI in a certificate that states both.

One pattern must match the whole URI, so each worker has exactly one spelling: no percent-encoding,
no leading zeros, no case folding, and nothing to normalise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sealring.errors import ConfigurationError
from sealring.limits import MAX_WORLD

_JOB = re.compile(r"[A-Za-z0-9._-]{1,63}", re.ASCII)
_URI = re.compile(r"spiffe://sealring/([A-Za-z0-9._-]{1,63})/rank/(0|[1-9][0-9]{0,4})", re.ASCII)

_RESOURCE = re.compile(
    r"(?:[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}/){2}[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}"
)

URI_HOST = "sealring"


def is_resource(path: str) -> bool:
    """Whether `path` is the name of a broker's resource: repository/type/tag, no leading dots."""
    return _RESOURCE.fullmatch(path) is not None


def is_job(name: str) -> bool:
    # "." and ".." are path segments that SPIFFE forbids.
    return _JOB.fullmatch(name) is not None and name not in {".", ".."}


def check_job(name: str) -> str:
    if not is_job(name):
        raise ConfigurationError(
            f"the job name {name[:80]!r} is not usable: take 1 to 63 of A-Z a-z 0-9 . _ -"
        )
    return name


@dataclass(frozen=True, slots=True)
class WorkerName:
    """The name of a worker: its job and rank. The constructor checks both."""

    job: str
    rank: int

    def __post_init__(self) -> None:
        check_job(self.job)
        if not 0 <= self.rank < MAX_WORLD:
            raise ConfigurationError(f"rank {self.rank} is not between 0 and {MAX_WORLD - 1}")

    @property
    def uri(self) -> str:
        return f"spiffe://{URI_HOST}/{self.job}/rank/{self.rank}"

    @classmethod
    def parse(cls, uri: str) -> WorkerName | None:
        match = _URI.fullmatch(uri)
        if match is None:
            return None
        try:
            return cls(match[1], int(match[2]))
        except ConfigurationError:
            return None
