"""Names with digests, and the check that all statements' digests pass."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Final

from sealring.errors import ConfigurationError

DIGESTS: Final = frozenset(
    {
        "certificate",
        "configuration",
        "content",
        "evidence",
        "packages",
        "policy",
        "previous",
        "sha256",
    }
)
"""Fields of statements that are SHA-256 digests in lower-case hexadecimal."""
_is_sha256: Final = re.compile(r"[0-9a-f]{64}").fullmatch


@dataclass(frozen=True, slots=True)
class Checked:
    """Its digests are SHA-256 in lower-case hexadecimal."""

    def __post_init__(self) -> None:
        kind = type(self)
        for name in _KNOWN.get(kind) or _digests_of(kind):
            value = getattr(self, name)
            if isinstance(value, str) and not _is_sha256(value):
                raise ConfigurationError(f"{name} is not a SHA-256 digest of 64 digits")


_KNOWN: Final[dict[type, tuple[str, ...]]] = {}
"""Of each class its fields that are digests: an audit makes many thousands of these values."""


def _digests_of(kind: type[Checked]) -> tuple[str, ...]:
    _KNOWN[kind] = tuple(one.name for one in fields(kind) if one.name in DIGESTS)
    return _KNOWN[kind]


@dataclass(frozen=True, slots=True)
class Named(Checked):
    name: str
    sha256: str
