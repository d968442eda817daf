"""Sources of each format, small, and what their samples are."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sealring.vault.datasets.building import Built, ingest
from sealring.vault.datasets.formats import Limits
from sealring.vault.datasets.work import in_this_process
from sealring.vault.vault import Vault

COUNT = 103
"""Samples of the fixture `dataset`: a prime, so that no world or batch divides it."""


def numbers(batch: list[dict[str, Any]]) -> list[int]:
    return [sample["n"] for sample in batch]


def json_lines(folder: Path, count: int = 100, files: int = 2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        rows = range(number * count // files, (number + 1) * count // files)
        lines = [json.dumps({"n": row, "text": f"row {row} " + "x" * (row % 7)}) for row in rows]
        (folder / f"{number}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def tar(path: Path, members: Sequence[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def images(folder: Path) -> Path:
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for number in range(5):
            (folder / label / f"{number}.png").write_bytes(f"{label} {number}".encode() * 30)
    return folder


def tokens(folder: Path, count: int = 1000) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    np.arange(count, dtype="<u2").tofile(folder / "a.bin")
    return folder


def sealed(
    vault: Vault, source: Path, name: str = "data", shard: int = 500, **others: Any
) -> Built:
    """Ingests in this process."""
    limits = Limits(shard, others.pop("sample", 1 << 20))
    return ingest(vault, source, name, in_this_process, limits=limits, **others)
