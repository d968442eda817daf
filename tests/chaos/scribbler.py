"""The host writes into the memory that two ranks share. All that knows its layout is here."""

from __future__ import annotations

import mmap
import os
import struct
import threading
from random import Random
from typing import Final

from sealring.limits import RING_CONTROL_BYTES
from tests.chaos.history import History
from tests.chaos.plan import Fault
from tests.engine.local_world import RING_BYTES, LocalWorld

_POSITIONS: Final = (0, 128)
"""`written` and `taken` in a control page (native/shm_pipe.cpp)."""
_BURST: Final = 40


class Scribbler:
    """Strikes when told, on a thread of its own, so that it meets the ranks at work."""

    def __init__(self, fault: Fault, local: LocalWorld, history: History) -> None:
        self.fault = fault
        self._history = history
        self._chance = Random(f"{fault}{fault.place}{fault.amount}")
        low, high = sorted((fault.sender, fault.receiver))
        self._memory = mmap.mmap(
            local.memories[low, high], os.fstat(local.memories[low, high]).st_size
        )
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        if self._thread is None:
            what = ("flips bits of the rings", "overwrites positions", "writes anywhere")
            self._way = int(self.fault.amount * 3)
            self._history.hit(self.fault, f"the host {what[self._way]}", must_end=False)
            self._thread = threading.Thread(target=self._scribble, daemon=True)
            self._thread.start()

    def end(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self._memory.close()

    def _scribble(self) -> None:
        chance, pause = self._chance, threading.Event()
        for _ in range(_BURST):
            ring = chance.choice([0, RING_CONTROL_BYTES + RING_BYTES])
            if self._way == 0:
                self._memory[ring + RING_CONTROL_BYTES + chance.randrange(RING_BYTES)] ^= 1 << (
                    chance.randrange(8)
                )
            elif self._way == 1:
                value = chance.getrandbits(chance.choice([8, 18, 20, 64]))
                struct.pack_into("<Q", self._memory, ring + chance.choice(_POSITIONS), value)
            else:
                at = chance.randrange(len(self._memory) - 64)
                self._memory[at : at + 64] = chance.randbytes(64)
            pause.wait(0.002 * chance.random())
