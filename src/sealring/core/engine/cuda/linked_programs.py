"""Makes the links that a program needs before GPUs run it for the first time, in a large group.

Links carry the headers of all records, and the whole records of GPUs that have no other way. A GPU
must have a link's keys before kernels are launched, and NCCL must be connected with a peer before
anything waits for it. So the ranks first run the program on their CPUs with a few bytes, which
creates its links. Groups whose ranks are all linked when they form do not need this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager

from sealring import _native, limits
from sealring.core.engine.collective import Collective
from sealring.core.engine.rounds import linked, tried
from sealring.core.schedule import Algorithm, Operation
from sealring.errors import Unsupported


class LinkedPrograms:
    def __init__(self, native: _native.Engine, rank: int, members: Sequence[int]) -> None:
        """`members` are the group's ranks by their numbers in the job."""
        self._native, self._rank, self._members = native, rank, members
        self._large = len(members) > limits.MOST_LINKED_AT_ONCE
        self._done: set[tuple[Operation, Algorithm, int]] = set()
        self.connected: set[int] = set()
        self._refused = ""
        """Why GPUs of this group run nothing any more, or ''; the same on all ranks."""
        self._making = 0
        self._lock = threading.Lock()

    def missing_for(self, collective: Collective) -> bool:
        """Whether `make` must come before GPUs run this collective; the same on all ranks."""
        return self._large and (bool(self._refused) or _uses(collective) not in self._done)

    @property
    def making(self) -> bool:
        """Whether a `make` is under way. Kernels launched ahead might block it."""
        return self._making != 0

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Sets `making`. Enter it before `make` is queued; leave it when `make` has been run."""
        with self._lock:
            self._making += 1
        try:
            yield
        finally:
            with self._lock:
                self._making -= 1

    def make(
        self,
        collective: Collective,
        exchanges_with: Callable[[], set[int]],
        patience_s: float,
    ) -> Generator[Collective, None, None]:
        """Yields the collectives that create the program's links, once per program.

        `exchanges_with` returns the ranks with which this rank exchanges the program's records by
        NCCL; it is called when the links exist. Raises Unsupported on all ranks if the links cannot
        be made. If NCCL cannot connect, GPUs of this group run no program any more.
        """
        if self._refused:
            raise Unsupported(self._refused)
        if not self.missing_for(collective):
            return  # an earlier call in the queue has done it
        yield from linked(collective)
        new: set[int] = set()

        def connect() -> None:
            new.update(exchanges_with() - self.connected)
            if new:
                self._native.connect(sorted(new), patience_s)

        # Two rounds: if a rank failed to get keys, it would not take part in connecting.
        why = yield from tried(self._rank, self._members, self._native.put_late_keys)
        if not why and self._native.exchanges:
            why = yield from tried(self._rank, self._members, connect)
            self._refused = why and f"GPUs of this group are not connected: {why}"
        if why:
            raise Unsupported(f"GPUs cannot run {collective.operation.name.lower()}: {why}")
        self.connected |= new  # only when all ranks are: else one end would connect again alone
        self._done.add(_uses(collective))


def _uses(collective: Collective) -> tuple[Operation, Algorithm, int]:
    """Identifies a program; equal on all ranks."""
    return collective.operation, collective.algorithm, collective.root
