"""Compares what a process holds before and after its groups."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

_PATIENCE_S = 20.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Held(NamedTuple):
    threads: int
    descriptors: Counter[str]
    mappings: int


def held() -> Held:
    descriptors: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            descriptors[os.readlink(f"/proc/self/fd/{fd}").partition(":[")[0]] += 1
        except OSError:  # the descriptor of the listing itself
            continue
    threads = sum("sealring" in thread.name for thread in threading.enumerate())
    mappings = Path("/proc/self/maps").read_text().count("/memfd:sealring")
    return Held(threads, descriptors, mappings)


def left_behind(before: Held) -> str:
    """Returns what there is more of than before; dropped groups close on their own threads."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        now = held()
        more = [f"{now.threads - before.threads} threads"] * (now.threads > before.threads)
        more += [f"{now.mappings - before.mappings} mappings"] * (now.mappings > before.mappings)
        more += [f"{n} of {name}" for name, n in (now.descriptors - before.descriptors).items()]
        if not more or time.monotonic() > deadline:
            return ", ".join(more)
        gc.collect()
        time.sleep(0.02)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
