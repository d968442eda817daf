"""From a schedule's program to the core's."""

from __future__ import annotations

from sealring import _native
from sealring.core.schedule import Levels, Program


def to_native(program: Program, levels: Levels | None = None) -> _native.Program:
    """`levels` says in which exchange each step's records go, where GPUs exchange records."""
    of_steps = levels.of_steps if levels else [0] * len(program.steps)
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
                level,
            )
            for step, level in zip(program.steps, of_steps, strict=True)
        ],
        levels.count if levels else 1,
    )
