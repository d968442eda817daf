"""Names with digests, and the check that all statements' digests pass."""

from __future__ import annotations

import re
from dataclasses import dataclass
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
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Checked:
    """Its digests are SHA-256 in lower-case hexadecimal."""

    def __post_init__(self) -> None:
        for name in DIGESTS:
            value = getattr(self, name, None)
            if isinstance(value, str) and not _SHA256.fullmatch(value):
                raise ConfigurationError(f"{name} is not a SHA-256 digest of 64 digits")


@dataclass(frozen=True, slots=True)
class Named(Checked):
    name: str
    sha256: str
