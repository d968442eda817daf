"""From a schedule's program to the core's."""

from __future__ import annotations

from sealring import _native
from sealring.schedule import Program


def to_native(program: Program) -> _native.Program:
    return _native.Program(
        program.operation,
        program.algorithm,
        program.rank,
        program.world,
        program.slots,
        program.scratch,
        [
            (
                step.action,
                step.slot,
                step.peers,
                step.message,
                step.origin,
                step.source,
                step.after,
            )
            for step in program.steps
        ],
    )
