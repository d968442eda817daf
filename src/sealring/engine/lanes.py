"""How many lanes a group has, and how its ranks come to have them.

Every rank says how many threads it may use for a large collective; the least of them is the number
of lanes. A rank that cannot make one says why, and the group stays with the lane that it has. The
rounds are small collectives of the group itself (rounds.py), at its first large collective.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Generator, Mapping, Sequence
from typing import Final, NamedTuple

from sealring import _native
from sealring.engine.collective import Collective
from sealring.engine.rounds import Round, judged
from sealring.links.lanes import FirstEnd, Lanes, Pipe

_LOG = logging.getLogger("sealring")
_COUNT: Final = struct.Struct("<I")


class LaneSocket(NamedTuple):
    peer: int
    inode: int


def agree_on_lanes(
    native: _native.Engine,
    rank: int,
    members: Sequence[int],
    ends: Mapping[int, FirstEnd],
    threads: int,
) -> Generator[Collective, None, tuple[int, list[LaneSocket]]]:
    """Makes the lanes of all ranks, or of none; returns how many there are, and their sockets."""
    counts = Round(len(members), _COUNT.pack(threads))
    yield counts.collective()
    count = min(_COUNT.unpack(letter)[0] for letter in counts.letters())
    count = max(1, min(count, _native.MAX_LANES))
    if count == 1:
        native.drop_lanes()
        return 1, []
    lanes = Lanes(rank, ends, count)
    pipes: list[Pipe] = []
    sockets: list[LaneSocket] = []
    try:
        reason, letter = "", b""
        try:
            letter = lanes.offer()
        except Exception as problem:  # whatever it is, the others must not wait for a pipe
            reason = str(problem) or repr(problem)
        why = yield from judged(members, reason)
        if not why:
            offers = Round(len(members), letter)
            yield offers.collective()
            try:
                lanes.leave_pipes(offers.letters())
            except Exception as problem:
                reason = str(problem) or repr(problem)
            why = yield from judged(members, reason)
        if not why:
            try:
                pipes = lanes.take_pipes()
                # In the order of the lanes: each needs the one before.
                for pipe in sorted(pipes, key=lambda each: each.lane):
                    sockets.append(LaneSocket(pipe.peer, os.fstat(pipe.socket.fileno()).st_ino))
                    own, theirs = (None, None) if pipe.memory is None else pipe.memory
                    native.add_lane_link(pipe.lane, pipe.peer, pipe.socket.detach(), own, theirs)
            except Exception as problem:
                reason = str(problem) or repr(problem)
            why = yield from judged(members, reason)
    finally:
        lanes.close()
    if why:
        for pipe in pipes:
            pipe.socket.close()
        native.drop_lanes()
        _LOG.warning("sealring: large collectives use one thread: %s", why)
        return 1, []
    return count, sockets
