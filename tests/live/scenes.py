"""A worker's socket without a group: recorders with engines that only count."""

from __future__ import annotations

import time
from pathlib import Path

from sealring.live.gather import ProcessFacts
from sealring.live.status import TorchGroup


def facts(*, rank: int = 0, size: int = 2, job: str = "train") -> ProcessFacts:
    return ProcessFacts(
        job=job,
        rank=rank,
        size=size,
        host="host-a",
        identity="secret",
        certificate_ends=lambda: time.time() + 3600,
        sealed_only=lambda: True,
        store=None,
        torch_groups=lambda: [TorchGroup("0", "cpu:gloo", 2, False)],
    )


def private(path: Path) -> Path:
    path.mkdir(mode=0o700)
    return path
