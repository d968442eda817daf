"""What happened since the last statement, in the order in which it was reported."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

from sealring.provenance.intervals import CheckpointRef, DataRange, Privacy


@dataclass(slots=True)
class Noted:
    data: list[DataRange] = field(default_factory=list)
    checkpoints_in: list[CheckpointRef] = field(default_factory=list)
    checkpoints_out: list[CheckpointRef] = field(default_factory=list)


class Notes:
    """Filled by any thread, and emptied by the one that makes a statement."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._noted = Noted()
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

    def take(self) -> Noted:
        with self._lock:
            noted, self._noted = self._noted, Noted()
            return noted
