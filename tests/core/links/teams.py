"""Light workers of one process, in a group that is too large to link all pairs at once."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sealring.errors import SealringError, named
from sealring.lab.bench.forming import LightGroup, LightWorker
from tests.core.links.worlds import ISSUER, DictStore, busy_threads

SIZE = 12


class Team:
    """Light workers; each runs in its own thread while it has something to do."""

    def __init__(self, size: int, hosts: Sequence[int]) -> None:
        store = DictStore()
        self.size = size
        self.workers = [
            LightWorker(ISSUER.credentials(rank, world=size), size, store, f"host-{host}")
            for rank, host in enumerate(hosts)
        ]
        self.groups: list[LightGroup] = []
        self._pool = ThreadPoolExecutor(size)

    def form(self, timeout_s: float = 60.0) -> list[Any]:
        """Returns what each rank gets, a group or an error; keeps the groups."""
        members = range(self.size)
        made = self.all(
            lambda rank: self.workers[rank].form("default", members, timeout_s=timeout_s)
        )
        self.groups = [each for each in made if isinstance(each, LightGroup)]
        return made

    def all(self, call: Callable[[int], Any], *but: int) -> list[Any]:
        """Returns each rank's result, or the code of its error and the rank it is about."""

        def run(rank: int) -> Any:
            try:
                return call(rank)
            except SealringError as error:
                return named(error), getattr(error, "peer", None)

        return list(self._pool.map(run, [rank for rank in range(self.size) if rank not in but]))

    def close(self) -> None:
        for group in self.groups:
            group.close()
        self._pool.shutdown()
        self.groups.clear()
        gc.collect()


@contextlib.contextmanager
def team(
    size: int = SIZE, *, formed: bool = True, hosts: Sequence[int] | None = None
) -> Iterator[Team]:
    """Yields a team; soon after the block no descriptor and no thread of it may be left.

    Resources of earlier tests may close meanwhile, so fewer may be left than before. `hosts` gives
    the number of each rank's host; without it each rank has its own host.
    """
    descriptors, threads = len(os.listdir("/proc/self/fd")), busy_threads()
    one = Team(size, hosts or range(size))
    try:
        if formed:
            one.form()
        yield one
    finally:
        one.close()
    until = time.monotonic() + 20
    while busy_threads() > threads or len(os.listdir("/proc/self/fd")) > descriptors:
        assert time.monotonic() < until, [each.name for each in threading.enumerate()]
        time.sleep(0.01)
