"""Lanes: the parallel pipes of each pair of ranks that let several threads share a collective.

Before a group's first large collective its ranks agree on lanes by small collectives. Every rank
says how many threads it may use; the least number is the number of lanes. Then each pair opens its
further pipes by the exchange that opens all pipes. If a rank cannot open a pipe, it says why, and
the collective uses only the first lane.

If all ranks of the group are linked, every pair gets all lanes. In a larger group (forming.py) only
the pairs that the collective's program uses get them. Other pairs get theirs before the first large
collective of another program. All ranks know which programs have their lanes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Sequence
from typing import Final

from sealring import _native, limits
from sealring.core.engine.collective import Collective
from sealring.core.engine.failures import Names
from sealring.core.engine.link_ends import LinkSocket, socket_of
from sealring.core.engine.rounds import first_objection, least, linked, tried
from sealring.core.handshake.terms import PipeName
from sealring.core.links.exchange import Exchange
from sealring.core.no_fork import NoFork
from sealring.core.schedule import Algorithm, Operation
from sealring.errors import PeerUnreachable

_LOG = logging.getLogger("sealring")

MAX_LANED_WORLD: Final = 256
"""A larger group has one lane, because in each lane a rank needs a key of every member."""
LANED_BYTES: Final = 2 * _native.STRIPE_SEGMENTS * limits.RECORD_BYTES
"""A slot must have this many bytes to use lanes. A shorter one has too few segments to share."""
MOST_THREADS: Final = 8
"""The default limit of threads for a large collective. More threads are no faster, because memory
bandwidth is then the limit."""
_SECONDS: Final = 5.0
"""How long a rank waits for its further pipes at most."""
_PART_OF_TIMEOUT: Final = 0.5
"""The part of the collective's timeout that a rank waits for its further pipes. At the end of the
timeout the other ranks would give up this rank, not only the lanes."""
_MOST_PIPES: Final = 64
"""The most further pipes that a rank opens for one program in a group whose ranks are not all
linked. Each takes memory and a descriptor. (In a group of 8 linked ranks with 8 threads each, a
rank has 49.)"""


def threads_by_default(cores: int, local_ranks: int) -> int:
    """The threads of one rank: its equal part of the cores that `local_ranks` ranks share."""
    return max(1, min(MOST_THREADS, cores // max(1, local_ranks)))


def lanes_for(longest_slot_bytes: float, world: int, threads: int, peers_of_a_rank: int = 1) -> int:
    """The number of lanes that share a collective if every rank may use `threads` threads.

    `peers_of_a_rank` is the number of ranks with which a rank exchanges the collective's records.
    """
    if longest_slot_bytes < LANED_BYTES or world > MAX_LANED_WORLD:
        return 1
    return min(threads, _most_lanes(world, peers_of_a_rank), _native.MAX_LANES)


def _most_lanes(world: int, peers: int) -> int:
    """The most lanes that a rank can have in a program in which it has `peers` peers."""
    if world <= limits.MOST_LINKED_AT_ONCE:
        return _native.MAX_LANES
    return 1 + _MOST_PIPES // max(1, peers)


Uses = tuple[Operation, Algorithm, int]
"""Identifies a program by its operation, algorithm and root, which are equal on all ranks."""


class GroupLanes:
    def __init__(
        self,
        rank: int,
        world: int,
        exchange: Exchange | None,
        threads: int,
    ) -> None:
        """`threads` is how many threads this rank may use. `rank` is the rank in the group.

        Without an exchange the group has only the first lane.
        """
        self._rank, self._world = rank, world
        self._all_linked = world <= limits.MOST_LINKED_AT_ONCE
        self.exchange = exchange
        self.counts: dict[Uses | None, int] = {}
        """The agreed number of lanes of each program. The key None stands for all programs, in a
        group in which all pairs have the same lanes."""
        self._made: dict[int, int] = {}
        """The number of lanes with each rank for which this rank has tried; 1 if that failed."""
        self.limit = threads
        """The most lanes that this rank can have in a program."""

    def missing_for(self, collective: Collective) -> bool:
        """Whether ranks must agree on lanes before this collective; the same on all ranks."""
        laned = self.exchange is not None and self._world <= MAX_LANED_WORLD
        if not laned or collective.ready is not None:
            return False
        large = collective.total is not None and _is_large(collective)
        return large and self._uses(collective) not in self.counts

    def count_for(self, collective: Collective) -> int:
        """The number of lanes that share this collective; the same on all ranks.

        If ranks do not know each other's slots, the core itself keeps short slots on one lane.
        """
        small = collective.total is not None and not _is_large(collective)
        if collective.ready is not None or small:
            return 1
        return self.counts.get(self._uses(collective), 1)

    @property
    def most(self) -> int:
        """The largest number of lanes that ranks have agreed on so far, for any program."""
        return max(self.counts.values(), default=1)

    def _uses(self, collective: Collective) -> Uses | None:
        if self._all_linked:
            return None
        return collective.operation, collective.algorithm, collective.root

    def agree(
        self,
        native: _native.Engine,
        names: Names,
        collective: Collective,
        peers_of: Callable[[Collective], set[int]],
        timeout_s: float,
    ) -> Generator[Collective, None, list[LinkSocket]]:
        """Yields the collectives by which ranks agree; once per program. Returns the new sockets.

        `peers_of` returns the ranks with which this rank exchanges a collective's records.
        `timeout_s` is the timeout of `collective`.
        """
        if not self.missing_for(collective):
            return []  # an earlier call in the queue has done it
        uses = self._uses(collective)
        everyone = set(range(self._world)) if uses is None else peers_of(collective)
        peers = everyone - {self._rank}
        new = sorted(peers - self._made.keys())
        count = yield from least(self._most_with(peers))
        count = max(1, min(count, _native.MAX_LANES))
        if count == 1:
            self.counts[uses] = 1
            if uses is None:  # no program of this group will have more lanes
                native.drop_lanes(new)
            return []
        if uses is not None:
            yield from linked(collective)
        sockets: list[LinkSocket] = []
        within_s = min(_SECONDS, timeout_s * _PART_OF_TIMEOUT)

        not_come = ""

        def open_all() -> None:
            nonlocal not_come
            try:
                sockets.extend(self._open(native, names.members, new, count, within_s))
            except PeerUnreachable as missing:
                not_come = str(missing)

        # First the ranks that failed for a reason of their own: they may know why a pipe did not
        # reach another rank. Only then the ranks that a pipe did not reach.
        why = yield from tried(self._rank, names.members, open_all)
        if why := why or (yield from first_objection(self._rank, names.members, not_come)):
            _LOG.warning("sealring: a large collective uses one thread: %s", why)
            native.drop_lanes(new)
            count, sockets = 1, []
        else:
            native.complete_lanes(new)
        if self.most == 1:  # the core never makes more lanes than the first time
            self.limit = count
        self.counts[uses] = count
        self._made.update(dict.fromkeys(new, count))
        return sockets

    def _most_with(self, peers: set[int]) -> int:
        """The most lanes that this rank can have in a program with these peers."""
        made = [self._made[peer] for peer in peers & self._made.keys()]
        return min([self.limit, _most_lanes(self._world, len(peers)), *made]) if peers else 1

    def _open(
        self,
        native: _native.Engine,
        members: Sequence[int],
        peers: Sequence[int],
        count: int,
        within_s: float,
    ) -> list[LinkSocket]:
        """Opens the further pipes to these peers and gives them to the core."""
        assert self.exchange is not None
        names = [
            PipeName(members[peer], "collectives", lane)
            for peer in peers
            for lane in range(1, count)
        ]
        links = self.exchange.open_agreed(names, within_s)
        sockets: list[LinkSocket] = []
        with contextlib.ExitStack() as untaken:
            for link in links:
                # The link's own keys are not used: the core derives a lane's keys from lane 0's.
                untaken.callback(link.discard)
            for link in links:  # in the order of the lanes: each needs the previous one
                sockets.append(socket_of(link.peer, link))
                memory = (None, None) if link.memory is None else link.memory
                with NoFork():  # else a forked child might get a socket that it does not know of
                    peer, socket = members.index(link.peer), link.socket.detach()
                    native.add_lane_link(link.lane, peer, socket, *memory)
        return sockets


def _is_large(collective: Collective) -> bool:
    return max([size for _, size in collective.slots], default=0) >= LANED_BYTES
