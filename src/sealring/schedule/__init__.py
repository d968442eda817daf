"""A collective as a small program of steps; pure, no torch, no I/O.

choose   which algorithm, by operation, world and size
layout   where a tensor is cut into chunks, and chunks into segments
build    the program, written by ring or direct
check    whether the programs of all ranks fit together
"""

from sealring.schedule.build import input_slots, program_for
from sealring.schedule.check import check_programs
from sealring.schedule.choose import choose
from sealring.schedule.layout import chunks, segment_bytes
from sealring.schedule.program import Action, Algorithm, Operation, Program, ProgramWriter, Step

__all__ = [
    "Action",
    "Algorithm",
    "Operation",
    "Program",
    "ProgramWriter",
    "Step",
    "check_programs",
    "choose",
    "chunks",
    "input_slots",
    "program_for",
    "segment_bytes",
]
