"""How many lanes a group has, and how its ranks come to have them.

Every rank says how many threads it may use for a large collective; the least of them is the number
of lanes. A rank that cannot make one says why, and the group stays with the lane that it has. The
rounds are small collectives of the group itself (rounds.py), at its first large collective.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
from collections.abc import Callable, Generator, Sequence
from typing import Final

from sealring import _native, limits
from sealring.engine.collective import Collective
from sealring.engine.failures import Names
from sealring.engine.link_ends import LinkEnds, LinkSocket
from sealring.engine.rounds import Round, judged
from sealring.links.forming import MOST_LINKED_AT_ONCE
from sealring.links.lanes import Lanes, first_end

_LOG = logging.getLogger("sealring")
_COUNT: Final = struct.Struct("<I")


MAX_LANED_WORLD: Final = MOST_LINKED_AT_ONCE
"""A larger group has one lane: its ranks are not all linked to each other."""
LANED_BYTES: Final = 2 * _native.STRIPE_SEGMENTS * limits.RECORD_BYTES
"""Of a slot: what is shorter has segments for one lane, or hardly for two."""
MOST_THREADS: Final = 8
"""Of a large collective, unless set otherwise: more move no more bytes, the memory is busy then."""


def threads_by_default(cores: int, local_ranks: int) -> int:
    """Each of the ranks that share the cores gets its part of them."""
    return max(1, min(MOST_THREADS, cores // max(1, local_ranks)))


def lanes_for(longest_slot_bytes: float, world: int, threads: int) -> int:
    """The lanes that share a collective, where every rank may use so many threads."""
    large = longest_slot_bytes >= LANED_BYTES and world <= MAX_LANED_WORLD
    return min(threads, _native.MAX_LANES) if large else 1


class GroupLanes:
    def __init__(
        self, rank: int, world: int, links: Sequence[tuple[int, LinkEnds]], threads: int
    ) -> None:
        """`threads` is how many this rank may use."""
        self._rank, self._world, self._threads = rank, world, threads
        self._ends = {
            peer: first_end(link.socket, link.memory)
            for peer, link in links
            if world <= MAX_LANED_WORLD
        }
        self.count: int | None = None
        """None until the ranks have agreed."""

    def missing_for(self, collective: Collective) -> bool:
        """Whether ranks must agree before this one; all ranks say the same."""
        if self.count is not None or not 1 < self._world <= MAX_LANED_WORLD:
            return False
        return collective.total is not None and collective.ready is None and _is_large(collective)

    def count_for(self, collective: Collective) -> int:
        """The lanes that share this collective; all ranks say the same.

        Where ranks do not know each other's slots, the core keeps the short ones on one lane.
        """
        small = collective.total is not None and not _is_large(collective)
        return 1 if collective.ready is not None or small else self.count or 1

    def agree(
        self, native: _native.Engine, names: Names
    ) -> Generator[Collective, None, list[LinkSocket]]:
        """The collectives by which ranks agree, once per group; returns the lanes' sockets."""
        if self.count is not None:
            return []
        members = names.members
        counts = Round(len(members), _COUNT.pack(self._threads))
        yield counts.collective()
        least = min(_COUNT.unpack(letter)[0] for letter in counts.letters())
        count = max(1, min(least, _native.MAX_LANES))
        sockets: list[LinkSocket] = []
        if count > 1:
            taken: list[tuple[int, int]] = []
            why = yield from self._make(native, members, count, taken)
            if why:
                count = 1
                _LOG.warning("sealring: large collectives use one thread: %s", why)
            else:
                sockets = [self._described(names, peer, inode) for peer, inode in taken]
        if count == 1:
            native.drop_lanes()
        else:
            native.complete_lanes()
        self.count = count
        return sockets

    def _described(self, names: Names, peer: int, inode: int) -> LinkSocket:
        host, transport = names.hosts.get(peer, ""), self._ends[peer].transport
        return LinkSocket(names.members[peer], host, transport, inode)

    def _make(
        self,
        native: _native.Engine,
        members: Sequence[int],
        count: int,
        taken: list[tuple[int, int]],
    ) -> Generator[Collective, None, str]:
        """Returns '' if all ranks have the lanes, else the reason of the first that has not.

        `taken` gets the peer and the inode of each socket that the core has.
        """
        lanes = Lanes(self._rank, self._ends, count)
        letters: list[bytes] = []

        def offer() -> None:
            letters.append(lanes.offer())

        def take() -> None:
            with contextlib.ExitStack() as untaken:
                pipes = lanes.take_pipes()
                for pipe in pipes:
                    untaken.callback(pipe.socket.close)
                # In the order of the lanes: each needs the one before.
                for pipe in sorted(pipes, key=lambda each: each.lane):
                    taken.append((pipe.peer, os.fstat(pipe.socket.fileno()).st_ino))
                    own, theirs = (None, None) if pipe.memory is None else pipe.memory
                    native.add_lane_link(pipe.lane, pipe.peer, pipe.socket.detach(), own, theirs)

        try:
            if why := (yield from _tried(members, offer)):
                return why
            offers = Round(len(members), letters[0])
            yield offers.collective()
            if why := (yield from _tried(members, lambda: lanes.leave_pipes(offers.letters()))):
                return why
            return (yield from _tried(members, take))
        finally:
            lanes.close()


def _is_large(collective: Collective) -> bool:
    return max([size for _, size in collective.slots], default=0) >= LANED_BYTES


def _tried(members: Sequence[int], step: Callable[[], None]) -> Generator[Collective, None, str]:
    """Takes a step; returns why it could not be taken, by the first rank that could not."""
    problem = ""
    try:
        step()
    except Exception as error:  # whatever it is, the others must not wait for a pipe
        problem = str(error) or repr(error)
    return (yield from judged(members, problem))
