"""Which algorithm: one table, to be replaced by a measured one.

Direct takes one hop instead of world - 1, so it wins while latency dominates. In an all-reduce it
pays with (world - 1) times the opening and reducing, so its limit falls as the world grows.
"""

from __future__ import annotations

from typing import Final

from sealring.schedule.build import ALGORITHMS
from sealring.schedule.program import Algorithm, Operation

DIRECT_UP_TO_BYTES: Final = {
    Operation.ALL_REDUCE: 32 << 10,
    Operation.REDUCE_SCATTER: 64 << 10,
    Operation.ALL_GATHER: 64 << 10,
    Operation.BROADCAST: 32 << 10,
    Operation.REDUCE: 32 << 10,
}
ALL_REDUCE_DIRECT_TOTAL_BYTES: Final = 512 << 10
"""All ranks' contributions together: 32 KiB each up to 16 ranks, 8 KiB each with 64."""


def choose(
    operation: Operation, world: int, nbytes: int, override: Algorithm | None = None
) -> Algorithm:
    """The algorithm for a collective in which one rank's message has `nbytes` bytes.

    That is the tensor in an all-reduce, a reduce or a broadcast, one rank's part in an all-gather
    (its input) or a reduce-scatter (its output).

    An `override` must be the same on all ranks, or the collective fails as out of step. It holds
    for those operations that have the algorithm; the others are as if there were none.
    """
    if override in ALGORITHMS[operation]:
        return override
    if operation not in DIRECT_UP_TO_BYTES:
        return Algorithm.DIRECT
    limit = DIRECT_UP_TO_BYTES[operation]
    if operation is Operation.ALL_REDUCE:
        limit = min(limit, ALL_REDUCE_DIRECT_TOTAL_BYTES // world)
    return Algorithm.DIRECT if nbytes <= limit else Algorithm.RING
