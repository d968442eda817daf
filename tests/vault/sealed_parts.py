"""Sealed files of the suite for GPUs, with their plaintext."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sealring import _native
from sealring.vault.gpu_batches import SealedPart
from sealring.vault.sealed import CHACHA, Place


def place() -> Place:
    return Place(bytes(16), bytes(range(16)), 1, CHACHA, _native.Secret(bytes(range(32))))


@contextmanager
def sealed_parts(folder: Path, contents: list[bytes]) -> Iterator[list[SealedPart]]:
    opened: list[SealedPart] = []
    with ExitStack() as files:
        for number, plain in enumerate(contents):
            path, part = folder / f"{number}.sealed", f"shard {number}"
            path.write_bytes(place().seal(part, plain))
            descriptor = files.enter_context(path.open("rb")).fileno()
            opened.append(SealedPart(place().reader(descriptor, part, path.name), path.name))
        yield opened
