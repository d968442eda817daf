"""monitored_barrier: a barrier that names the ranks that did not arrive.

A rank that has not arrived does not answer over its link. So every rank writes its arrival to the
store, and rank 0 reads there which ranks to name. The store is not trusted: ranks pass only by a
sealed barrier that follows. A store that lies or does not answer can at most make rank 0 name a
wrong rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import Store

from sealring.core.links.rendezvous import StoreCalls
from sealring.errors import GroupClosed, GroupError, PeerSilent

ROOT = 0


class Arrivals:
    """The arrivals at one group's monitored barriers, as the store has them."""

    def __init__(self, store: Store, rank: int, world: int, epoch: str) -> None:
        self._store: Store | None = store
        self._rank = rank
        self._world = world
        self._prefix = f"sealring/monitored/{epoch}"
        self._count = 0

    def close(self) -> None:
        """Drops the store, because an error's traceback may keep the group alive after its end."""
        self._store = None

    def note_own(self, timeout_s: float) -> None:
        self._count += 1
        key, store = self._key(self._rank), self.store
        calls = StoreCalls(time.monotonic() + timeout_s)
        # If the store does not answer, rank 0 names this rank and the barrier fails with that
        # error, not with the store's.
        with suppress(RuntimeError, TimeoutError):
            calls.make(lambda: store.set(key, "here"))

    def missing(self, timeout_s: float, *, wait_all_ranks: bool) -> list[int]:
        """The ranks that have not arrived in time: only the first, or with `wait_all_ranks` all."""
        deadline = time.monotonic() + timeout_s
        calls = StoreCalls(deadline)
        missing = []
        for rank in range(self._world):
            if rank == self._rank or self._came(calls, rank, deadline):
                continue
            missing.append(rank)
            if not wait_all_ranks:
                break
        return missing

    def _came(self, calls: StoreCalls, rank: int, deadline: float) -> bool:
        keys, store = [self._key(rank)], self.store
        remaining_s = deadline - time.monotonic()
        try:
            # A store counts milliseconds, and treats 0 as no time limit.
            if remaining_s >= 0.001:
                calls.make(lambda: store.wait(keys, timedelta(seconds=remaining_s)))
                return True
            return bool(calls.make(lambda: store.check(keys)))
        except (RuntimeError, TimeoutError):
            return False

    @property
    def store(self) -> Store:
        if self._store is None:
            raise GroupClosed("this process group was destroyed. Make a new one.")
        return self._store

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{self._count}/{rank}"


def pass_barrier(
    arrivals: Arrivals,
    rank: int,
    timeout_s: float,
    *,
    wait_all_ranks: bool,
    meet: Callable[[], object],
    give_up: Callable[[], None],
) -> None:
    """Returns when all ranks have arrived; raises PeerSilent with Gloo's texts if some did not."""
    in_time = f"in {timeout_s * 1000:.0f} ms. The group is closed."
    if timeout_s <= 0:
        give_up()
        raise PeerSilent(f"Rank {rank} timed out in monitoredBarrier {in_time}")
    arrivals.note_own(timeout_s)
    if rank != ROOT:
        try:
            meet()
        except GroupError as error:
            raise PeerSilent(
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while "
                f"waiting for send/recv from rank {ROOT}, which says who is missing: {error}",
                peer=ROOT,
                collective=error.collective,
            ) from error
        return
    if missing := arrivals.missing(timeout_s, wait_all_ranks=wait_all_ranks):
        give_up()
        ranks = ", ".join(map(str, missing))
        word = "Ranks" if wait_all_ranks else "Rank"
        raise PeerSilent(
            f"{word} {ranks} failed to pass monitoredBarrier {in_time}", peer=missing[0]
        )
    meet()
