"""What the demo learns from: the Python standard library's own sources, which are already here."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from sealring.errors import ConfigurationError

CORPUS_BYTES: Final = 4 << 20
_NOT_THE_LIBRARY: Final = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}
)


def standard_library(limit: int = CORPUS_BYTES, root: Path | None = None) -> bytes:
    """The first `limit` bytes of all modules, in the order of their paths."""
    root = root or Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in _modules(root):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if not text:
        raise ConfigurationError(
            f"the demo reads Python's own sources, and there are none in {root}: install Python "
            "with its standard library as source files"
        )
    return bytes(text[:limit])


def _modules(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        # os.walk goes on into what is left here, in this order.
        folders[:] = sorted(name for name in folders if name not in _NOT_THE_LIBRARY)
        for name in sorted(files):
            if name.endswith(".py"):
                yield Path(folder, name)


class Batches:
    """Random windows of the text; the same ones for the same seed."""

    def __init__(self, text: bytes, *, context: int, size: int, seed: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self._context = context
        self._size = size
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[Tensor, Tensor]:
        """(inputs, targets): each target is the byte that follows its input."""
        starts = torch.randint(
            len(self._text) - self._context, (self._size, 1), generator=self._generator
        )
        windows = self._text[starts + torch.arange(self._context + 1)]
        return windows[:, :-1], windows[:, 1:]
