"""Ring programs: every rank sends only to the next rank and receives only from the previous one.

A record's message number is the number of the chunk that it carries. Chunk c starts at rank c + 1,
collects one contribution per hop, and ends complete at its owner, rank c. So a rank SENDs every
chunk except its own, and PUBLISHes only its own: a (sealer, message) pair identifies one record.
"""

from __future__ import annotations

from itertools import pairwise

from sealring.core.schedule.program import Algorithm, Operation, Program, ProgramWriter


def all_reduce(world: int, rank: int, *, average: bool, premultiply: bool) -> Program:
    """Slot i is chunk i of the tensor, in place.

    Chunk c ends as x[c] op (... op (x[c+2] op x[c+1])), indices modulo the world. Its owner does
    the last reduction, and all other ranks get a copy, so all have the same bits.
    """
    writer = ProgramWriter(Operation.ALL_REDUCE, Algorithm.RING, rank, world, slots=world)
    order = _chunks_as_they_pass(world, rank)
    if premultiply:
        for chunk in order:
            writer.premultiply(chunk)
    for leaving, arriving in pairwise(order):
        writer.send(leaving, _following(world, rank), message=leaving)
        writer.receive_reduce(arriving, _preceding(world, rank), message=arriving)
    if average:
        writer.average(rank)
    _gather(writer, own=rank)
    return writer.program()


def reduce_scatter(world: int, rank: int, *, average: bool, premultiply: bool) -> Program:
    """Slots 0..world-1 are the chunks of the input and only read; slot `world` is the output.

    All slots are equally long. The output may be the memory of input chunk `rank` (as in Megatron's
    distributed optimizer), because only one step reads that chunk, the copy into the output.

    Chunk c ends as x[c] op (((x[c+1] op x[c+2]) op ...) op x[c-1]).
    """
    writer = ProgramWriter(Operation.REDUCE_SCATTER, Algorithm.RING, rank, world, slots=world + 1)
    output = world
    order = _chunks_as_they_pass(world, rank)
    # Partial sums that pass this rank are in scratch. There are two scratch slots, so that the next
    # sum can come in while the previous one still waits to leave. Without a factor the first chunk
    # leaves unchanged, and the last ends in the output: they need no scratch.
    passing = max(0, world - 1 if premultiply else world - 2)
    buffers = [writer.scratch(like=output) for _ in range(min(2, passing))]

    in_hand = order[0]
    if premultiply and world > 1:
        in_hand = buffers[-1]
        writer.copy(in_hand, order[0])
        writer.premultiply(in_hand)
    for hop, (leaving, arriving) in enumerate(pairwise(order)):
        writer.send(in_hand, _following(world, rank), message=leaving)
        if arriving == rank:
            break
        in_hand = buffers[hop % 2]
        if premultiply:
            writer.copy(in_hand, arriving)
            writer.premultiply(in_hand)
            writer.receive_reduce(in_hand, _preceding(world, rank), message=arriving)
        else:
            # Receiving into scratch and then adding this rank's part saves a copy.
            writer.receive(in_hand, _preceding(world, rank), message=arriving)
            writer.reduce(in_hand, arriving)

    writer.copy(output, rank)
    if premultiply:
        writer.premultiply(output)
    if world > 1:
        writer.receive_reduce(output, _preceding(world, rank), message=rank)
    if average:
        writer.average(output)
    return writer.program()


def all_gather(world: int, rank: int) -> Program:
    """Slots 0..world-1 are the regions of the output; slot `world` is this rank's input.

    The input may be the memory of output region `rank`.
    """
    writer = ProgramWriter(Operation.ALL_GATHER, Algorithm.RING, rank, world, slots=world + 1)
    _gather(writer, own=world)
    writer.copy(rank, world)
    return writer.program()


def broadcast(world: int, rank: int, *, root: int) -> Program:
    """Slot 0 is the tensor, which goes along a chain of ranks that starts at the root."""
    writer = ProgramWriter(Operation.BROADCAST, Algorithm.RING, rank, world, slots=1)
    following = _following(world, rank)
    if rank != root:
        received = writer.receive(0, _preceding(world, rank), message=0, origin=root)
        if following != root:
            writer.forward(received, [following])
    elif world > 1:
        writer.publish(0, [following], message=0)
    return writer.program()


def reduce(world: int, rank: int, *, root: int, average: bool, premultiply: bool) -> Program:
    """Slot 0 is the tensor. The root's becomes the result; the others' do not change.

    The ranks form a chain that ends at the root and computes
    x[root] op ((x[root+1] op x[root+2]) op ... op x[root-1]). Each rank opens and seals the tensor
    once, and all ranks work at the same time on different segments.
    """
    writer = ProgramWriter(Operation.REDUCE, Algorithm.RING, rank, world, slots=1)
    preceding, following = _preceding(world, rank), _following(world, rank)
    if rank == root:
        if premultiply:
            writer.premultiply(0)
        if world > 1:
            writer.receive_reduce(0, preceding, message=preceding)
        if average:
            writer.average(0)
        return writer.program()
    own = 0
    if premultiply:
        own = writer.scratch(like=0)
        writer.copy(own, 0)
        writer.premultiply(own)
    passing = own
    if preceding != root:
        passing = writer.scratch(like=0)
        writer.receive(passing, preceding, message=preceding)
        # As in reduce_scatter, the passing sum is the left operand, which saves a copy.
        writer.reduce(passing, own)
    writer.send(passing, following, message=rank)
    return writer.program()


def _gather(writer: ProgramWriter, own: int) -> None:
    """Writes the way of slot `own` around to all ranks, sealed once; slot c receives rank c's."""
    world, rank = writer.world, writer.rank
    following = _following(world, rank)
    if world > 1:
        writer.publish(own, [following], message=rank)
    for chunk in _chunks_as_they_pass(world, rank)[:-1]:
        received = writer.receive(chunk, _preceding(world, rank), message=chunk, origin=chunk)
        if chunk != following:  # the owner of a chunk does not get it back
            writer.forward(received, [following])


def _chunks_as_they_pass(world: int, rank: int) -> list[int]:
    """All chunks in the order in which they pass this rank; its own comes last and stays."""
    return [(rank - 1 - hop) % world for hop in range(world)]


def _following(world: int, rank: int) -> int:
    return (rank + 1) % world


def _preceding(world: int, rank: int) -> int:
    return (rank - 1) % world
