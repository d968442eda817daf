"""The host writes into memory that two ranks share. Only this file knows the memory's layout."""

from __future__ import annotations

import mmap
import struct
import threading
from random import Random
from typing import Final

from tests.chaos.history import History
from tests.chaos.plan import Fault
from tests.core.engine.local_world import MEMORY_BYTES, RING_BYTES, LocalWorld

_POSITIONS: Final = (RING_BYTES, RING_BYTES + 128)
"""Where `written` and `taken` of one end are, after its ring (native/transport/shm_pipe.cpp)."""
_BURST: Final = 40


class Scribbler:
    """Writes into the memory from its own thread, while the ranks use that memory."""

    def __init__(self, fault: Fault, local: LocalWorld, history: History) -> None:
        self.fault = fault
        self._history = history
        self._chance = Random(f"{fault}{fault.place}{fault.amount}")
        ways = ((fault.sender, fault.receiver), (fault.receiver, fault.sender))
        self._memories = [mmap.mmap(local.memories[way], MEMORY_BYTES) for way in ways]
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
        for memory in self._memories:
            memory.close()

    def _scribble(self) -> None:
        chance, pause = self._chance, threading.Event()
        for _ in range(_BURST):
            memory = chance.choice(self._memories)
            if self._way == 0:
                memory[chance.randrange(RING_BYTES)] ^= 1 << chance.randrange(8)
            elif self._way == 1:
                value = chance.getrandbits(chance.choice([8, 18, 20, 64]))
                struct.pack_into("<Q", memory, chance.choice(_POSITIONS), value)
            else:
                at = chance.randrange(len(memory) - 64)
                memory[at : at + 64] = chance.randbytes(64)
            pause.wait(0.002 * chance.random())
