"""Direct programs: every rank exchanges with every other at once, one hop for any world.

A record's message number is the number of the chunk it carries, and 0 where it carries the whole
tensor. A rank SENDs each chunk to one peer and PUBLISHes at most one record, so a
(sealer, message) pair names one record.

Reductions run in rank order, ((x[0] op x[1]) op x[2]) ..., on every rank alike, whichever record
came first: so all ranks end with the same bits.
"""

from __future__ import annotations

from sealring.core.schedule.program import Algorithm, Operation, Program, ProgramWriter


def all_reduce(world: int, rank: int, *, average: bool, premultiply: bool) -> Program:
    """Slot 0 is the whole tensor, in place."""
    writer = ProgramWriter(Operation.ALL_REDUCE, Algorithm.DIRECT, rank, world, slots=1)
    if premultiply:
        writer.premultiply(0)
    own = 0
    if rank > 0:
        # Rank 0's contribution comes first, so ours must wait elsewhere. It is published from
        # there too: then no receive has to wait until a slow peer has taken what we send.
        own = writer.scratch(like=0)
        writer.copy(own, 0)
    writer.publish(own, _others(world, rank), message=0)
    for contributor in range(world):
        if contributor == rank:
            if rank > 0:
                writer.reduce(0, own)
        elif contributor == 0:
            writer.receive(0, contributor, message=0, origin=contributor)
        else:
            writer.receive_reduce(0, contributor, message=0, origin=contributor)
    if average:
        writer.average(0)
    return writer.program()


def reduce_scatter(world: int, rank: int, *, average: bool, premultiply: bool) -> Program:
    """Slots 0..world-1 are the chunks of the input and only read; slot `world` is the output.

    All slots are equally long. The output may be the memory of input chunk `rank`: nothing is
    written to it before that chunk was read.
    """
    writer = ProgramWriter(Operation.REDUCE_SCATTER, Algorithm.DIRECT, rank, world, slots=world + 1)
    output = world
    _send_chunks(writer, premultiply=premultiply)

    own, total = rank, output
    if rank > 0:
        total = writer.scratch(like=output)
    if premultiply or rank == 0:
        own = output if rank == 0 else writer.scratch(like=output)
        writer.copy(own, rank)
    if premultiply:
        writer.premultiply(own)
    for contributor in range(world):
        if contributor == rank:
            if rank > 0:
                writer.reduce(total, own)
        elif contributor == 0:
            writer.receive(total, contributor, message=rank)
        else:
            writer.receive_reduce(total, contributor, message=rank)
    if total != output:
        writer.copy(output, total)
    if average:
        writer.average(output)
    return writer.program()


def all_gather(world: int, rank: int) -> Program:
    """Slots 0..world-1 are the regions of the output; slot `world` is this rank's input.

    The input may be the memory of output region `rank`.
    """
    writer = ProgramWriter(Operation.ALL_GATHER, Algorithm.DIRECT, rank, world, slots=world + 1)
    writer.publish(world, _others(world, rank), message=rank)
    writer.copy(rank, world)
    for owner in _others(world, rank):
        writer.receive(owner, owner, message=owner, origin=owner)
    return writer.program()


def broadcast(world: int, rank: int, *, root: int) -> Program:
    """Slot 0 is the tensor."""
    writer = ProgramWriter(Operation.BROADCAST, Algorithm.DIRECT, rank, world, slots=1)
    if rank == root:
        writer.publish(0, _others(world, rank), message=0)
    else:
        writer.receive(0, root, message=0, origin=root)
    return writer.program()


def reduce(world: int, rank: int, *, root: int, average: bool, premultiply: bool) -> Program:
    """Slot 0 is the tensor: the root's becomes the result, the others' stay as they are."""
    writer = ProgramWriter(Operation.REDUCE, Algorithm.DIRECT, rank, world, slots=1)
    own = 0
    if (premultiply and rank != root) or (rank == root and root > 0):
        own = writer.scratch(like=0)
        writer.copy(own, 0)
    if premultiply:
        writer.premultiply(own)
    if rank != root:
        writer.send(own, root, message=rank)
        return writer.program()
    for contributor in range(world):
        if contributor == rank:
            if rank > 0:
                writer.reduce(0, own)
        elif contributor == 0:
            writer.receive(0, contributor, message=contributor)
        else:
            writer.receive_reduce(0, contributor, message=contributor)
    if average:
        writer.average(0)
    return writer.program()


def gather(world: int, rank: int, *, root: int) -> Program:
    """The root's slots 0..world-1 are the regions of the output, its slot `world` its own input,
    which may be the memory of region `root`. All others have slot 0 alone, their input."""
    slots = world + 1 if rank == root else 1
    writer = ProgramWriter(Operation.GATHER, Algorithm.DIRECT, rank, world, slots=slots)
    if rank != root:
        writer.send(0, root, message=rank)
        return writer.program()
    writer.copy(rank, world)
    for owner in _others(world, rank):
        writer.receive(owner, owner, message=owner)
    return writer.program()


def scatter(world: int, rank: int, *, root: int) -> Program:
    """The root's slots 0..world-1 are the parts of its input, its slot `world` its own output,
    which may be the memory of part `root`. All others have slot 0 alone, their output."""
    slots = world + 1 if rank == root else 1
    writer = ProgramWriter(Operation.SCATTER, Algorithm.DIRECT, rank, world, slots=slots)
    if rank != root:
        writer.receive(0, root, message=rank)
        return writer.program()
    for owner in _others(world, rank):
        writer.send(owner, owner, message=owner)
    writer.copy(world, rank)
    return writer.program()


def all_to_all(world: int, rank: int) -> Program:
    """Slots 0..world-1 are what goes to each rank, the next `world` slots what comes from each.

    They may be of any lengths, as long as the two ends of each message agree on its own.
    """
    writer = ProgramWriter(Operation.ALL_TO_ALL, Algorithm.DIRECT, rank, world, slots=2 * world)
    for peer in _others(world, rank):
        writer.send(peer, peer, message=peer)
    writer.copy(world + rank, rank)
    for peer in reversed(_others(world, rank)):
        writer.receive(world + peer, peer, message=rank)
    return writer.program()


def barrier(world: int, rank: int) -> Program:
    """Slot 0 is empty; what counts is that a record came from everybody."""
    writer = ProgramWriter(Operation.BARRIER, Algorithm.DIRECT, rank, world, slots=1)
    others = _others(world, rank)
    writer.publish(0, others, message=0)
    if others:
        # Not into slot 0: no receive shall wait until a slow peer has taken our record.
        arrived = writer.scratch(like=0)
        for peer in others:
            writer.receive(arrived, peer, message=0, origin=peer)
    return writer.program()


def _send_chunks(writer: ProgramWriter, *, premultiply: bool) -> None:
    """Chunk p of the input goes to rank p, times the factor where there is one.

    Each product gets scratch of its own. Sharing one would let a slow peer hold up what we send
    to the others, and with links of limited room that can end in a circle of ranks waiting.
    """
    for peer in _others(writer.world, writer.rank):
        chunk = peer
        if premultiply:
            chunk = writer.scratch(like=peer)
            writer.copy(chunk, peer)
            writer.premultiply(chunk)
        writer.send(chunk, peer, message=peer)


def _others(world: int, rank: int) -> list[int]:
    """All other ranks, each rank starting with the next one: no rank is the first of all others."""
    return [(rank + distance) % world for distance in range(1, world)]
