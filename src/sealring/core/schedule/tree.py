"""Binomial trees: the number of hops is logarithmic, and no rank talks to all others.

Ranks are counted from the root. The parent of v is v without its lowest bit. So the children of v
are v + 1, v + 2, v + 4, ..., below v plus its lowest bit and below the world.

Sums go up the tree and are sealed again at each hop; the message number is the sender's rank. The
root seals what goes down once, with its own rank as the message number, and other ranks forward it.
"""

from __future__ import annotations

from sealring.core.schedule.program import Algorithm, Operation, Program, ProgramWriter


def all_reduce(
    operation: Operation, world: int, rank: int, *, average: bool, premultiply: bool
) -> Program:
    """Slot 0 is the whole tensor, in place. Rank 0 is the root of the ways up and down."""
    writer = ProgramWriter(operation, Algorithm.TREE, rank, world, slots=1)
    if premultiply:
        writer.premultiply(0)
    _climb(writer, 0, root=0)
    if rank == 0 and average:
        writer.average(0)
    _descend(writer, 0, root=0)
    return writer.program()


def reduce(world: int, rank: int, *, root: int, average: bool, premultiply: bool) -> Program:
    """Slot 0 is the tensor. The root's becomes the result; the others' do not change.

    Every rank computes ((x op child) op child) ..., the nearest child first.
    """
    writer = ProgramWriter(Operation.REDUCE, Algorithm.TREE, rank, world, slots=1)
    partial = 0
    if rank != root and (premultiply or _children(world, rank, root)):
        partial = writer.scratch(like=0)
        writer.copy(partial, 0)
    if premultiply:
        writer.premultiply(partial)
    _climb(writer, partial, root=root)
    if rank == root and average:
        writer.average(0)
    return writer.program()


def broadcast(world: int, rank: int, *, root: int) -> Program:
    """Slot 0 is the tensor."""
    writer = ProgramWriter(Operation.BROADCAST, Algorithm.TREE, rank, world, slots=1)
    _descend(writer, 0, root=root)
    return writer.program()


def barrier(world: int, rank: int) -> Program:
    """Slot 0 is empty. Rank 0 is the root.

    A record going up says that all ranks below the sender have arrived; one going down says that
    all ranks have.
    """
    writer = ProgramWriter(Operation.BARRIER, Algorithm.TREE, rank, world, slots=1)
    for child in _children(world, rank, 0):
        writer.receive(0, child, message=child)
    if rank != 0:
        writer.send(0, parent_of(world, rank, 0), message=rank)
    _descend(writer, 0, root=0)
    return writer.program()


def objection(world: int, rank: int, *, root: int) -> Program:
    """Slot 0 is the text, which goes from the root to all ranks along the tree of rank 0.

    So it needs only the links of `all_reduce`, but up to twice as many hops as `broadcast`.
    """
    writer = ProgramWriter(Operation.OBJECTION, Algorithm.TREE, rank, world, slots=1)
    others = _children(world, rank, 0)[::-1]
    if rank != 0:
        others.insert(0, parent_of(world, rank, 0))
    if rank == root:
        writer.publish(0, others, message=root)
    else:
        nearer = _neighbour_towards(world, rank, root)
        others.remove(nearer)
        writer.forward(writer.receive(0, nearer, message=root, origin=root), others)
    return writer.program()


def _neighbour_towards(world: int, rank: int, other: int) -> int:
    """The neighbour of `rank` in the tree of rank 0 that is on the way to `other`.

    The ranks below a child have smaller numbers than the next child.
    """
    below = [child for child in _children(world, rank, 0) if child <= other]
    reach = rank & -rank or world
    return below[-1] if below and other < rank + reach else parent_of(world, rank, 0)


def _climb(writer: ProgramWriter, partial: int, *, root: int) -> None:
    """Adds the children's parts to slot `partial` and sends it to the parent."""
    world, rank = writer.world, writer.rank
    for child in _children(world, rank, root):
        writer.receive_reduce(partial, child, message=child)
    if rank != root:
        writer.send(partial, parent_of(world, rank, root), message=rank)


def _descend(writer: ProgramWriter, slot: int, *, root: int) -> None:
    world, rank = writer.world, writer.rank
    # The largest subtree first, because it needs the most hops.
    children = _children(world, rank, root)[::-1]
    if rank == root:
        writer.publish(slot, children, message=root)
    else:
        parent = parent_of(world, rank, root)
        writer.forward(writer.receive(slot, parent, message=root, origin=root), children)


def parent_of(world: int, rank: int, root: int) -> int:
    """The parent of `rank` in the tree of `root`; the root's parent is the root itself."""
    place = (rank - root) % world
    return ((place & (place - 1)) + root) % world


def _children(world: int, rank: int, root: int) -> list[int]:
    place = (rank - root) % world
    reach = place & -place or world
    distances = (1 << bit for bit in range(world.bit_length()))
    return [(place + d + root) % world for d in distances if d < reach and place + d < world]
