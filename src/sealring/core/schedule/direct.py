"""Direct programs: every rank exchanges with every other at once, in one hop.

A record's message number is the number of the chunk that it carries, or 0 if it carries the whole
tensor. A rank SENDs each chunk to one peer and PUBLISHes at most one record, so a (sealer, message)
pair identifies one record.

Every rank reduces in rank order, ((x[0] op x[1]) op x[2]) ..., whatever record comes first. So all
ranks end with the same bits.
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
        # Rank 0's contribution comes first, so this rank's waits in scratch. It is also published
        # from there, so that no receive waits until a slow peer has taken it.
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

    All slots are equally long. The output may be the memory of input chunk `rank`, because nothing
    is written to it before that chunk has been read.
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
    """Slot 0 is the tensor. The root's becomes the result; the others' do not change."""
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
    """On the root, slots 0..world-1 are the regions of the output, and slot `world` is its input,
    which may be the memory of region `root`. Other ranks have only slot 0, their input."""
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
    """On the root, slots 0..world-1 are the parts of its input, and slot `world` is its output,
    which may be the memory of part `root`. Other ranks have only slot 0, their output."""
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
    """Slots 0..world-1 are sent, one to each rank; the next `world` slots receive from each rank.

    Slots may have any lengths, as long as the two ends of each message agree on its length.
    """
    writer = ProgramWriter(Operation.ALL_TO_ALL, Algorithm.DIRECT, rank, world, slots=2 * world)
    for peer in _others(world, rank):
        writer.send(peer, peer, message=peer)
    writer.copy(world + rank, rank)
    for peer in reversed(_others(world, rank)):
        writer.receive(world + peer, peer, message=rank)
    return writer.program()


def barrier(world: int, rank: int) -> Program:
    """Slot 0 is empty. A rank passes when a record has come from every other rank."""
    writer = ProgramWriter(Operation.BARRIER, Algorithm.DIRECT, rank, world, slots=1)
    others = _others(world, rank)
    writer.publish(0, others, message=0)
    if others:
        # Not into slot 0, so that no receive waits until a slow peer has taken this rank's record.
        arrived = writer.scratch(like=0)
        for peer in others:
            writer.receive(arrived, peer, message=0, origin=peer)
    return writer.program()


def _send_chunks(writer: ProgramWriter, *, premultiply: bool) -> None:
    """Sends chunk p of the input to rank p, times the factor if there is one.

    Each product gets its own scratch. If they shared one, a slow peer would delay the chunks of
    the others, and as links have limited room, ranks could wait for each other in a circle.
    """
    for peer in _others(writer.world, writer.rank):
        chunk = peer
        if premultiply:
            chunk = writer.scratch(like=peer)
            writer.copy(chunk, peer)
            writer.premultiply(chunk)
        writer.send(chunk, peer, message=peer)


def _others(world: int, rank: int) -> list[int]:
    """All other ranks, beginning with the next one, so that not all ranks begin with the same."""
    return [(rank + distance) % world for distance in range(1, world)]
