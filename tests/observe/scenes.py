"""A worker's socket without a group: recorders whose engines only count."""

from __future__ import annotations

import time
from pathlib import Path

from sealring.core.hooks import GroupMade
from tests.observe.test_flight import CountingEngine, recorder


def group_made() -> GroupMade:
    return GroupMade(
        recorder(CountingEngine()),
        size=2,
        host="host-a",
        identity="secret",
        certificate_ends=lambda: time.time() + 3600,
        torch_groups=lambda: [("0", "cpu:gloo", 2, False)],
    )


def private(path: Path) -> Path:
    path.mkdir(mode=0o700)
    return path
