"""What happened since the last statement, in the order in which it was reported."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sealring.record.provenance.intervals import CheckpointRef, DataRange, Privacy


@dataclass(slots=True)
class Noted:
    data: list[DataRange] = field(default_factory=list)
    checkpoints_in: list[CheckpointRef] = field(default_factory=list)
    checkpoints_out: list[CheckpointRef] = field(default_factory=list)


_OPENED: dict[tuple[str, str], None] = {}
"""Names and digests of the datasets that this process has opened, recorded or not yet."""


def opened(name: str, digest: str) -> DataRange:
    """A dataset from which any sample can be read from now on: a range without positions."""
    _OPENED[name, digest] = None
    return DataRange(name, digest, 0, 0, 0, None, None)


def opened_so_far() -> list[DataRange]:
    """A script may open its data before its recording begins."""
    return [opened(*each) for each in list(_OPENED)]


class Notes:
    """Filled by any thread, and emptied by the one that makes a statement."""

    def __init__(self, data: Sequence[DataRange] = ()) -> None:
        self._lock = threading.Lock()
        self._noted = Noted(list(data))
        self.privacy: Privacy | None = None

    def data(self, read: DataRange) -> None:
        """Ranges that follow one another become one: a statement must not grow with its steps."""
        with self._lock:
            known = self._noted.data
            for index in range(len(known) - 1, -1, -1):
                last = known[index]
                if replace(last, first=read.first, end=read.end) == read and last.end == read.first:
                    known[index] = replace(last, end=read.end)
                    return
            known.append(read)

    def checkpoint_in(self, checkpoint: CheckpointRef) -> None:
        with self._lock:
            self._noted.checkpoints_in.append(checkpoint)

    def checkpoint_out(self, checkpoint: CheckpointRef) -> None:
        with self._lock:
            self._noted.checkpoints_out.append(checkpoint)

    def resumed_at(self, step: int) -> list[CheckpointRef]:
        """Takes out the checkpoints that were read: the run goes on from them at `step`."""
        with self._lock:
            read = [replace(one, step=step) for one in self._noted.checkpoints_in]
            self._noted.checkpoints_in = []
            return read

    def any(self) -> bool:
        with self._lock:
            return self._noted != Noted()

    def take(self) -> Noted:
        with self._lock:
            noted, self._noted = self._noted, Noted()
            return noted
