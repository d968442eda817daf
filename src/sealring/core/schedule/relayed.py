"""Converts a program so that every record is sealed for one peer: none is published or forwarded.

This is needed if some ranks of a group read each other's GPU memory while others exchange records
(native/device/wires.hpp). Then no memory can be read by all receivers of a record. So a rank that
would forward a record opens it, and seals the content again for each receiver.
"""

from __future__ import annotations

from functools import lru_cache

from sealring.core.schedule.program import Action, Program, ProgramWriter


@lru_cache(maxsize=256)
def relayed(program: Program) -> Program:
    world, rank = program.world, program.rank
    writer = ProgramWriter(program.operation, program.algorithm, rank, world, program.slots)
    for like in program.scratch:
        writer.scratch(like)

    def message(of: int, receiver: int) -> int:
        """Authors number messages below the world."""
        return world * (1 + of) + receiver

    for step in program.steps:
        match step.action:
            case Action.SEND:
                writer.send(step.slot, step.peers[0], step.message)
            case Action.PUBLISH | Action.FORWARD:
                for peer in step.peers:
                    writer.send(step.slot, peer, message(step.message, peer))
            case Action.RECEIVE | Action.RECEIVE_REDUCE:
                number = step.message if step.origin < 0 else message(step.message, rank)
                receive = writer.receive if step.action is Action.RECEIVE else writer.receive_reduce
                receive(step.slot, step.peers[0], number)
            case Action.COPY:
                writer.copy(step.slot, step.source)
            case Action.REDUCE:
                writer.reduce(step.slot, step.source)
            case Action.AVERAGE:
                writer.average(step.slot)
            case Action.PREMULTIPLY:
                writer.premultiply(step.slot)
    return writer.program()


def relayed_message(message: int, world: int) -> int:
    """The number that a published or forwarded message had in the program before `relayed`."""
    return message // world - 1
