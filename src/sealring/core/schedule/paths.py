"""The path of each chunk through a group, computed without writing all ranks' programs.

The ranks' parts of a chunk go up a tree to the chunk's home, or the chunk goes down a tree from its
home. The tree is a star, the hosts, a binomial tree, or a ring without one of its links. Values
here are arrays over all ranks, because writing n programs of n chunks would take long.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from sealring.core.schedule.hierarchical import Topology
from sealring.core.schedule.program import Algorithm
from sealring.core.schedule.tree import parent_of

Ranks: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Paths(ABC):
    """The paths of all chunks. `apart` has a number for each rank. Between ranks of different
    numbers a record needs an exchange."""

    apart: Ranks

    @property
    def world(self) -> int:
        return len(self.apart)

    @abstractmethod
    def up(self, home: int) -> Ranks:
        """The rank to which each rank sends its part of the chunk; for the home, the home
        itself."""

    def down(self, home: int) -> Ranks:
        """The rank from which each rank gets the chunk; for the home, the home itself."""
        return self.up(home)

    def crossing(self, peers: Ranks) -> Ranks:
        """1 for each rank whose number differs from its peer's, else 0."""
        return np.not_equal(self.apart, self.apart[peers]).astype(np.int64)

    def exchanges_up(self, home: int) -> Ranks:
        """The number of exchanges that are complete when each rank has all parts that it sends
        up."""
        peers = self.up(home)
        crossing = self.crossing(peers)
        complete = np.zeros_like(peers)
        while True:
            there = complete + crossing
            there[home] = 0
            following = np.zeros_like(peers)
            np.maximum.at(following, peers, there)
            if np.array_equal(following, complete):
                return complete
            complete = following

    def taken(self, home: int) -> Ranks:
        """All ranks, ordered so that ranks with the same receiver are in the order it takes
        them."""
        return np.arange(self.world, dtype=np.int64)

    def levels_up(self, home: int) -> Ranks:
        """The exchange in which each rank's part goes up, if it needs one.

        No part goes in an earlier exchange than a part that its receiver takes before it: NCCL gets
        no receive of the next round before all records of this round have been opened.
        """
        peers, complete = self.up(home), self.exchanges_up(home)
        senders = self.taken(home)
        senders = senders[senders != home]
        senders = senders[np.argsort(peers[senders], kind="stable")]
        receivers = peers[senders]
        there = complete[senders] + self.crossing(peers)[senders]
        apart = receivers * (self.world + 1)  # more than the number of exchanges on the way up
        earlier = np.maximum.accumulate(there + apart) - apart
        before = np.zeros_like(earlier)
        same = receivers[1:] == receivers[:-1]
        before[1:][same] = earlier[:-1][same]
        levels = np.zeros_like(complete)
        levels[senders] = np.maximum(complete[senders], before - 1)
        return levels

    def exchanges_down(self, home: int) -> Ranks:
        """The number of further exchanges that are complete when each rank has the chunk."""
        peers = self.down(home)
        crossing = self.crossing(peers)
        complete = np.zeros_like(peers)
        while not np.array_equal(following := complete[peers] + crossing, complete):
            complete = following
        return complete


class Star(Paths):
    def up(self, home: int) -> Ranks:
        return np.full(self.world, home, np.int64)


@dataclass(frozen=True)
class Hosts(Paths):
    topology: Topology

    def up(self, home: int) -> Ranks:
        spokesmen = self._members[self._begin + home % self._size]
        spokesmen[self._host_of[home]] = home
        peers: Ranks = spokesmen[self._host_of]
        peers[spokesmen] = home
        return peers

    def taken(self, home: int) -> Ranks:
        """Ranks of the same host first, in rank order; then other hosts' relay ranks, by host."""
        speaks = self.up(home) == home
        speaks &= self._host_of != self._host_of[home]
        return np.lexsort((np.where(speaks, self._host_of, 0), speaks))

    @cached_property
    def _host_of(self) -> Ranks:
        """Each rank's host, numbered in the order of the hosts' first ranks."""
        place = {host: place for place, host in enumerate(self.topology.hosts())}
        return np.array([place[host] for host in self.topology.host_of], np.int64)

    @cached_property
    def _size(self) -> Ranks:
        return np.bincount(self._host_of)

    @cached_property
    def _begin(self) -> Ranks:
        return np.cumsum(self._size) - self._size

    @cached_property
    def _members(self) -> Ranks:
        return np.argsort(self._host_of, kind="stable")


class Tree(Paths):
    def up(self, home: int) -> Ranks:
        ranks = range(self.world)
        return np.array([parent_of(self.world, rank, home) for rank in ranks], np.int64)

    def taken(self, home: int) -> Ranks:
        return (np.arange(self.world, dtype=np.int64) + home) % self.world


class Ring(Paths):
    """Going up, a chunk starts at the rank after its home and goes around to it; going down, it
    continues from there."""

    def up(self, home: int) -> Ranks:
        peers = np.roll(np.arange(self.world, dtype=np.int64), -1)
        peers[home] = home
        return peers

    def down(self, home: int) -> Ranks:
        peers = np.roll(np.arange(self.world, dtype=np.int64), 1)
        peers[home] = home
        return peers

    def exchanges_up(self, home: int) -> Ranks:
        return self._along(home + 1)

    def levels_up(self, home: int) -> Ranks:
        return self.exchanges_up(home)

    def exchanges_down(self, home: int) -> Ranks:
        return self._along(home)

    def _along(self, first: int) -> Ranks:
        """The number of exchanges that a chunk has taken at each rank, once around from `first`."""
        order = (np.arange(self.world, dtype=np.int64) + first) % self.world
        complete = np.zeros_like(order)
        complete[order[1:]] = np.cumsum(self.apart[order[:-1]] != self.apart[order[1:]])
        return complete


def paths_of(algorithm: Algorithm, apart: tuple[int, ...], topology: Topology) -> Paths:
    numbers = np.array(apart, np.int64)
    match algorithm:
        case Algorithm.RING:
            return Ring(numbers)
        case Algorithm.TREE:
            return Tree(numbers)
        case Algorithm.HIERARCHICAL:
            return Hosts(numbers, topology)
        case Algorithm.DIRECT | Algorithm.PARAMETER_SERVER:
            return Star(numbers)
