"""Hierarchical programs: first inside each host, then between hosts, to minimize traffic between
them.

Chunk c belongs to rank c, its home. In every other host one rank is the gateway of chunk c. On the
way in, each rank SENDs its part of chunk c to its host's gateway (or to the home, in the home's
host). The gateway adds the parts up and SENDs one sum to the home. On the way out the home
PUBLISHes to its own host and to the gateways, which forward the sealed record inside their hosts.
So chunk c enters and leaves a host once. Different chunks have different gateways, as far as there
are enough ranks, so all links between hosts work at once.

With one host, or with one rank in each host, this is a parameter server whose shards are spread
over all ranks: every chunk goes to its home in one hop and comes back in one.

A record's message number is the number of its chunk; in `reduce`, which has one chunk and whose
home is the root, it is the sender's rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from sealring.core.schedule.program import Algorithm, Operation, Program, ProgramWriter


@dataclass(frozen=True, slots=True)
class Topology:
    """Which ranks share a host: host_of[r] is the number of rank r's host."""

    host_of: tuple[int, ...]
    _members: dict[int, list[int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        members: dict[int, list[int]] = {}
        for rank, host in enumerate(self.host_of):
            members.setdefault(host, []).append(rank)
        object.__setattr__(self, "_members", members)

    def members(self, host: int) -> Sequence[int]:
        return self._members[host]

    def hosts(self) -> list[int]:
        """The hosts' numbers, in the order of their first ranks."""
        return list(self._members)

    def relay_rank(self, home: int, host: int) -> int:
        """The rank that handles `home`'s chunk in `host`: `home` if it is there, else a gateway."""
        if self.host_of[home] == host:
            return home
        members = self.members(host)
        return members[home % len(members)]

    def mates(self, rank: int) -> Sequence[int]:
        """The other ranks of the rank's host, beginning with the next one."""
        members = self.members(self.host_of[rank])
        place = members.index(rank)
        return [*members[place + 1 :], *members[:place]]

    def gateways(self, home: int) -> list[int]:
        own = self.host_of[home]
        return [self.relay_rank(home, host) for host in self.hosts() if host != own]


def one_host(world: int) -> Topology:
    return Topology((0,) * world)


_FEW: Final = 4
"""So few ranks are enough: a binomial tree of four ranks, and a ring of three, have a rank that
forwards."""


def small_world(topology: Topology) -> Topology:
    """A smaller topology: rank 0's host and the largest other hosts, with a few ranks of each.

    An algorithm forwards records in the small topology exactly if it does in the large one.
    """
    on_host = Counter(topology.host_of)
    first = topology.host_of[0]
    largest = sorted(on_host, key=lambda host: (host != first, -on_host[host]))[:_FEW]
    kept: list[int] = []
    for host in topology.host_of:
        if host in largest and kept.count(host) < _FEW:
            kept.append(host)
    return Topology(tuple(kept))


def all_reduce(
    algorithm: Algorithm,
    topology: Topology,
    world: int,
    rank: int,
    *,
    average: bool,
    premultiply: bool,
) -> Program:
    """Slot i is chunk i of the tensor, in place.

    A host's sum is ((own op mate) op mate) ..., where `own` is the relay_rank's part and the mates
    follow in rank order. To its own host's sum the home adds the other hosts' sums in their order.
    """
    writer = ProgramWriter(Operation.ALL_REDUCE, algorithm, rank, world, slots=world)
    if premultiply:
        for chunk in _from(rank, world):
            writer.premultiply(chunk)
    for chunk in _from(rank, world):
        _collect(writer, topology, home=chunk, partial=chunk, message=chunk)
    if average:
        writer.average(rank)
    _spread(writer, topology, own=rank)
    return writer.program()


def reduce_scatter(
    topology: Topology, world: int, rank: int, *, average: bool, premultiply: bool
) -> Program:
    """Slots 0..world-1 are the chunks of the input and only read; slot `world` is the output.

    All slots are equally long. The output may be the memory of input chunk `rank`, because only one
    step reads that chunk, the copy into the output. The order of reduction is all_reduce's.
    """
    writer = ProgramWriter(
        Operation.REDUCE_SCATTER, Algorithm.HIERARCHICAL, rank, world, slots=world + 1
    )
    output = world
    for chunk in _from(rank, world):
        partial = chunk
        if chunk == rank:
            partial = output
        elif premultiply or _contributors(topology, rank, home=chunk):
            partial = writer.scratch(like=chunk)
        if partial != chunk:
            writer.copy(partial, chunk)
        if premultiply:
            writer.premultiply(partial)
        _collect(writer, topology, home=chunk, partial=partial, message=chunk)
    if average:
        writer.average(output)
    return writer.program()


def all_gather(topology: Topology, world: int, rank: int) -> Program:
    """Slots 0..world-1 are the regions of the output; slot `world` is this rank's input.

    The input may be the memory of output region `rank`.
    """
    writer = ProgramWriter(
        Operation.ALL_GATHER, Algorithm.HIERARCHICAL, rank, world, slots=world + 1
    )
    _spread(writer, topology, own=world)
    writer.copy(rank, world)
    return writer.program()


def broadcast(topology: Topology, world: int, rank: int, *, root: int) -> Program:
    """Slot 0 is the tensor."""
    writer = ProgramWriter(Operation.BROADCAST, Algorithm.HIERARCHICAL, rank, world, slots=1)
    if rank == root:
        writer.publish(0, [*topology.gateways(root), *topology.mates(root)], message=root)
    else:
        _take_published(writer, topology, 0, home=root)
    return writer.program()


def reduce(
    topology: Topology, world: int, rank: int, *, root: int, average: bool, premultiply: bool
) -> Program:
    """Slot 0 is the tensor. The root's becomes the result; the others' do not change."""
    writer = ProgramWriter(Operation.REDUCE, Algorithm.HIERARCHICAL, rank, world, slots=1)
    partial = 0
    if rank != root and (premultiply or _contributors(topology, rank, home=root)):
        partial = writer.scratch(like=0)
        writer.copy(partial, 0)
    if premultiply:
        writer.premultiply(partial)
    _collect(writer, topology, home=root, partial=partial, message=rank)
    if rank == root and average:
        writer.average(0)
    return writer.program()


def _contributors(topology: Topology, rank: int, *, home: int) -> list[int]:
    """The ranks whose parts of a chunk this rank adds to its own, in that order."""
    host = topology.host_of[rank]
    if rank != topology.relay_rank(home, host):
        return []
    mates = sorted(topology.mates(rank))
    return [*mates, *topology.gateways(home)] if rank == home else mates


def _collect(
    writer: ProgramWriter, topology: Topology, *, home: int, partial: int, message: int
) -> None:
    """Writes the way to the chunk's home; slot `partial` is this rank's part of the chunk."""
    rank = writer.rank
    contributors = _contributors(topology, rank, home=home)
    for contributor in contributors:
        # In `reduce` the message number is the sender's rank, elsewhere the chunk's number.
        theirs = contributor if writer.operation is Operation.REDUCE else message
        writer.receive_reduce(partial, contributor, message=theirs)
    if rank != home:
        relay_rank = topology.relay_rank(home, topology.host_of[rank])
        writer.send(partial, home if rank == relay_rank else relay_rank, message=message)


def _spread(writer: ProgramWriter, topology: Topology, own: int) -> None:
    """Writes the way of slot `own` to all ranks, sealed once; slot c receives rank c's."""
    world, rank = writer.world, writer.rank
    writer.publish(own, [*topology.gateways(rank), *topology.mates(rank)], message=rank)
    for home in _from(rank, world)[1:]:
        _take_published(writer, topology, home, home=home)


def _take_published(writer: ProgramWriter, topology: Topology, slot: int, *, home: int) -> None:
    rank = writer.rank
    relay_rank = topology.relay_rank(home, topology.host_of[rank])
    source = home if rank == relay_rank else relay_rank
    received = writer.receive(slot, source, message=home, origin=home)
    if rank == relay_rank:
        writer.forward(received, topology.mates(rank))


def _from(rank: int, world: int) -> list[int]:
    """All ranks, beginning with `rank`, so that not all ranks begin with the same."""
    return [(rank + distance) % world for distance in range(world)]
