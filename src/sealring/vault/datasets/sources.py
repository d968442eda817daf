"""Files to ingest: found, opened safely, and seen to stay as they are while they are read."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from sealring.errors import (
    BadSource,
    ConfigurationError,
    SealringError,
    named,
)
from sealring.vault.trees import files_below

SHARD_BYTES: Final = 64 << 20
LARGEST_SAMPLE: Final = 64 << 20
_BLOCK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    shard: int = SHARD_BYTES
    """Bytes of the source that one shard is made of, about."""
    sample: int = LARGEST_SAMPLE
    """A larger sample is refused."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What one shard is made from. The order is JSON: another process may carry it out."""

    order: dict[str, Any]
    bytes: int


@dataclass(frozen=True, slots=True)
class SourceFile:
    path: Path
    inside: str
    """Its path in the folder that is ingested; its name if it is ingested alone."""
    size: int


def source_files(source: Path) -> list[SourceFile]:
    """In the order of their paths. Names that begin with a dot are left out."""
    found = []
    for path, inside in files_below(source):
        hidden = any(part.startswith(".") for part in inside.split("/"))
        if not hidden and not path.is_dir():
            found.append(SourceFile(path, inside or path.name, path.stat().st_size))
    if not found:
        raise ConfigurationError(f"{source} holds no files to ingest")
    return sorted(found, key=lambda one: one.inside)


@contextlib.contextmanager
def parsing(name: object, form: str) -> Iterator[None]:
    """Parsers of other projects raise anything at a file that an attacker made: it is BadSource."""
    try:
        yield
    except SealringError:
        raise
    except Exception as problem:
        reason = f"{named(problem)}: {problem}"[:300]
        raise BadSource(f"{name} cannot be read as {form}. {reason}") from None


def range_digest(file: BinaryIO, ranges: Iterator[tuple[int, int]], about: bytes = b"") -> str:
    """SHA-256 of what is known of the bytes, and of the bytes from `start` to `stop`."""
    digest = hashlib.sha256(len(about).to_bytes(8, "big") + about)
    for start, stop in ranges:
        file.seek(start)
        left = stop - start
        while left:
            block = file.read(min(left, _BLOCK))
            if not block:
                raise BadSource(
                    f"{file.name} became shorter while it was read", code="vault.source_changed"
                )
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def cut(size: int, step: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, step):
        yield start, min(size, start + step)
