"""In a large group: what a program needs before GPUs run it for the first time.

Over links go the records of GPUs that have no other way, and the headers of all others. A GPU must
have a link's keys before kernels are launched, and NCCL must be connected with a peer before
anything waits for it. So the ranks first run a program on their CPUs, with next to nothing to do:
then its links are there. Groups whose ranks are all linked when they form need none of this.
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
        """Why GPUs run nothing any more; the same on all ranks."""
        self._making = 0
        self._lock = threading.Lock()

    def missing_for(self, collective: Collective) -> bool:
        """Whether ranks must do something before GPUs run this; all ranks say the same."""
        return self._large and (bool(self._refused) or _uses(collective) not in self._done)

    @property
    def making(self) -> bool:
        """Kernels that are launched ahead now might be in the way."""
        return self._making != 0

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """From before the call of `make` is queued until it has been run."""
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
        """The collectives by which it is done, once per program.

        `exchanges_with` returns the ranks with which this one exchanges records of the program by
        NCCL, once there are links. Unsupported, on all ranks alike, if it cannot be done. NCCL that
        cannot be connected is given up, and with it all programs.
        """
        if self._refused:
            raise Unsupported(self._refused)
        if not self.missing_for(collective):
            return  # done after this call was made, and before its turn
        yield from linked(collective)
        new: set[int] = set()

        def connect() -> None:
            new.update(exchanges_with() - self.connected)
            if new:
                self._native.connect(sorted(new), patience_s)

        # Two rounds: a rank that has no keys would not come to be connected with.
        why = yield from tried(self._rank, self._members, self._native.put_late_keys)
        if not why and self._native.exchanges:
            why = yield from tried(self._rank, self._members, connect)
            self._refused = why and f"GPUs of this group are not connected: {why}"
        if why:
            raise Unsupported(f"GPUs cannot run {collective.operation.name.lower()}: {why}")
        self.connected |= new  # when all are: else one end would connect again, and one would not
        self._done.add(_uses(collective))


def _uses(collective: Collective) -> tuple[Operation, Algorithm, int]:
    """A program, which is the same on all ranks."""
    return collective.operation, collective.algorithm, collective.root
