"""How many lanes a group has, and how its ranks come to have them.

Every rank says how many threads it may use for a large collective; the least of them is the number
of lanes. Then each pair opens its further pipes by the exchange that opens all pipes. A rank that
cannot have one says why, and the collective stays with the lane that it has.
The rounds are small collectives of the group itself, before its first large collective.

In a group whose ranks are all linked, each pair then has all lanes. In a larger one (forming.py)
those pairs have them that the collective's program uses, and other pairs get theirs before the
first large collective of another program. All ranks know which programs have their lanes.
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
"""A larger group has one lane: in each, a rank has a key of every member."""
LANED_BYTES: Final = 2 * _native.STRIPE_SEGMENTS * limits.RECORD_BYTES
"""Of a slot: what is shorter has segments for one lane, or hardly for two."""
MOST_THREADS: Final = 8
"""Of a large collective, unless set otherwise: more move no more bytes, the memory is busy then."""
_SECONDS: Final = 5.0
"""How long a rank waits for its further pipes, if the collective has more time than that."""
_PART_OF_TIMEOUT: Final = 0.5
"""Of the time that the others wait for it: at its end they give the rank up, and not the lanes."""
_MOST_PIPES: Final = 64
"""That a rank makes for one program, in a group whose ranks are not all linked. Each takes memory
and a descriptor. In a group of 8 ranks with 8 threads each, all linked, a rank has 49."""


def threads_by_default(cores: int, local_ranks: int) -> int:
    """Each of the ranks that share the cores gets its part of them."""
    return max(1, min(MOST_THREADS, cores // max(1, local_ranks)))


def lanes_for(longest_slot_bytes: float, world: int, threads: int, peers_of_a_rank: int = 1) -> int:
    """The lanes that share a collective, where every rank may use so many threads.

    `peers_of_a_rank` is the number of others with which a rank exchanges its records.
    """
    if longest_slot_bytes < LANED_BYTES or world > MAX_LANED_WORLD:
        return 1
    return min(threads, _most_lanes(world, peers_of_a_rank), _native.MAX_LANES)


def _most_lanes(world: int, peers: int) -> int:
    """The lanes that a rank can have in a program with so many peers."""
    if world <= limits.MOST_LINKED_AT_ONCE:
        return _native.MAX_LANES
    return 1 + _MOST_PIPES // max(1, peers)


Uses = tuple[Operation, Algorithm, int]
"""A program by its operation, algorithm and root, which are the same on all ranks."""


class GroupLanes:
    def __init__(
        self,
        rank: int,
        world: int,
        exchange: Exchange | None,
        threads: int,
    ) -> None:
        """`threads` is how many this rank may use. Ranks are the group's.

        Without an exchange there is the first lane alone.
        """
        self._rank, self._world = rank, world
        self._all_linked = world <= limits.MOST_LINKED_AT_ONCE
        self.exchange = exchange
        self.counts: dict[Uses | None, int] = {}
        """The lanes that ranks have agreed on for a program; None stands for all programs where
        all pairs have the same."""
        self._made: dict[int, int] = {}
        """The lanes with each rank that this one has made some with; 1 where that failed."""
        self.limit = threads
        """The lanes that this rank can have in a program."""

    def missing_for(self, collective: Collective) -> bool:
        """Whether ranks must agree before this one; all ranks say the same."""
        laned = self.exchange is not None and self._world <= MAX_LANED_WORLD
        if not laned or collective.ready is not None:
            return False
        large = collective.total is not None and _is_large(collective)
        return large and self._uses(collective) not in self.counts

    def count_for(self, collective: Collective) -> int:
        """The lanes that share this collective; all ranks say the same.

        Where ranks do not know each other's slots, the core keeps the short ones on one lane.
        """
        small = collective.total is not None and not _is_large(collective)
        if collective.ready is not None or small:
            return 1
        return self.counts.get(self._uses(collective), 1)

    @property
    def most(self) -> int:
        """The lanes of the programs that have most of them, as far as ranks have agreed."""
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
        """The collectives by which ranks agree, once per program; returns the lanes' sockets.

        `peers_of` returns the ranks with which this one exchanges a collective's records;
        `timeout_s` is the collective's.
        """
        if not self.missing_for(collective):
            return []  # ranks agreed after this call was made, and before its turn
        uses = self._uses(collective)
        everyone = set(range(self._world)) if uses is None else peers_of(collective)
        peers = everyone - {self._rank}
        new = sorted(peers - self._made.keys())
        count = yield from least(self._most_with(peers))
        count = max(1, min(count, _native.MAX_LANES))
        if count == 1:
            self.counts[uses] = 1
            if uses is None:  # there will be no others
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

        # A rank whose pipe did not come says so last: another one may know why.
        why = yield from tried(self._rank, names.members, open_all)
        if why := why or (yield from first_objection(self._rank, names.members, not_come)):
            _LOG.warning("sealring: a large collective uses one thread: %s", why)
            native.drop_lanes(new)
            count, sockets = 1, []
        else:
            native.complete_lanes(new)
        if self.most == 1:  # the core makes no more lanes than at first, none if that failed
            self.limit = count
        self.counts[uses] = count
        self._made.update(dict.fromkeys(new, count))
        return sockets

    def _most_with(self, peers: set[int]) -> int:
        """The lanes that this rank can have in a program with these."""
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
        """Opens the further pipes to these ranks and gives them to the core."""
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
                untaken.callback(link.discard)  # the core derives a lane's keys from the first's
            for link in links:  # in the order of the lanes: each needs the one before
                sockets.append(socket_of(link.peer, link))
                memory = (None, None) if link.memory is None else link.memory
                with NoFork():  # a child finds the socket at one end of this or at the other
                    peer, socket = members.index(link.peer), link.socket.detach()
                    native.add_lane_link(link.lane, peer, socket, *memory)
        return sockets


def _is_large(collective: Collective) -> bool:
    return max([size for _, size in collective.slots], default=0) >= LANED_BYTES
