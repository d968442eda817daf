"""Two ranks that exchange records in a ring, and a process that changes the ring meanwhile.

Run by test_shared_ring.py. `python -m tests.attacks.ring_writer SECONDS` prints how many worlds
ended with right results, with each error, and with a wrong element. If no record was destroyed, the
hostile process had no chance to run, and the program runs longer.

Each world runs all-reduces of two ranks until one fails. In each all-reduce a rank sends two
records: the first is for the peer alone, the second is published. Each is as long as an eighth of
the ring. The hostile process gets the file of rank 0's ring, as if it had opened the file before
the file was sealed. It keeps flipping one byte of the ciphertext.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import subprocess
import sys
import time
from collections import Counter
from typing import Final

from sealring.core.engine.collective import DType, ReduceKind
from sealring.core.schedule import Algorithm, Operation
from sealring.errors import GroupError
from tests.core.engine.cases import Case, expected, tensors_of
from tests.core.engine.local_world import MEMORY_BYTES, RING_BYTES, LocalWorld

HEADER, OVERHEAD = 80, 96
RECORD: Final = RING_BYTES // 8
ELEMENTS: Final = (RECORD - OVERHEAD) // 4
CASE: Final = Case(
    Operation.ALL_REDUCE, Algorithm.RING, 2 * ELEMENTS, DType.FLOAT32, ReduceKind.SUM
)
ROUNDS: Final = 40
SPOTS: Final = tuple(record * RECORD + HEADER + RECORD // 2 + 3 for record in (0, 1))
"""Where to write: the last byte of a float, which has its sign, in a record of each kind."""
WRONG: Final = "a wrong element"


def write_into_rings() -> None:
    """The hostile process: writes into the ring that it got last, until no more rings come."""
    orders = socket.socket(fileno=0)
    memory: mmap.mmap | None = None
    spot = 0
    while True:
        if memory is None or select.select([orders], [], [], 0)[0]:
            message, files, _, _ = socket.recv_fds(orders, 1, 1)
            if not message:
                return
            spot, (file,) = message[0], files
            memory = mmap.mmap(file, MEMORY_BYTES)
            os.close(file)
            orders.send(b"!")
        at = SPOTS[spot]
        for _ in range(500):
            memory[at] ^= 0x80


def run_world(orders: socket.socket, spot: int) -> str:
    with LocalWorld(2, transport="shm") as local:
        socket.send_fds(orders, [bytes([spot])], [local.memories[0, 1]])
        orders.recv(1)  # from now on the hostile process writes
        right = expected(CASE, 2, 0, local.record_bytes)
        for _ in range(ROUNDS):
            tensors = tensors_of(CASE, 2)
            errors = local.run([each.collective() for each in tensors], 5.0)
            for error, tensor, want in zip(errors, tensors, right, strict=True):
                if error is None and tensor.bits() != want:
                    return WRONG
            for error in errors:
                if error is not None:
                    assert isinstance(error, GroupError), repr(error)
                    return type(error).__name__
    return "right results"


def run_worlds(orders: socket.socket, seconds: float) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    began = time.monotonic()
    while (spent := time.monotonic() - began) < 10 * seconds:
        if outcomes["TamperedRecord"] and spent > seconds:
            break
        outcomes[run_world(orders, outcomes.total() % len(SPOTS))] += 1
    return outcomes


def main(seconds: float) -> None:
    orders, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tests.attacks.ring_writer"]
    with orders, subprocess.Popen(command, stdin=theirs) as hostile:  # type: ignore[call-overload]
        theirs.close()
        try:
            outcomes = run_worlds(orders, seconds)
        finally:
            hostile.kill()
    for outcome, count in outcomes.most_common():
        print(f"{count} {outcome}")


if __name__ == "__main__":
    main(float(sys.argv[1])) if len(sys.argv) > 1 else write_into_rings()
