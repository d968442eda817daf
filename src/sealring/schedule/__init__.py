"""A collective as a small program of steps; pure, no torch, no I/O.

table    which algorithm for which size, world and topology, as measured
choose   the algorithm of a collective, from that table or as it was set
layout   where a tensor is cut into chunks, and chunks into segments
build    the program, written by ring, direct, tree or hierarchical
check    whether the programs of all ranks fit together
"""

from sealring.schedule.build import (
    ALGORITHMS,
    cuts_into_chunks,
    input_slots,
    passes_records_on,
    program_for,
)
from sealring.schedule.check import check_programs
from sealring.schedule.choose import Selection, choose
from sealring.schedule.hierarchical import Topology
from sealring.schedule.layout import chunks, segment_bytes
from sealring.schedule.program import (
    CALLED,
    REDUCING,
    ROOTED,
    Action,
    Algorithm,
    Operation,
    Program,
    ProgramWriter,
    Step,
)

__all__ = [
    "ALGORITHMS",
    "CALLED",
    "REDUCING",
    "ROOTED",
    "Action",
    "Algorithm",
    "Operation",
    "Program",
    "ProgramWriter",
    "Selection",
    "Step",
    "Topology",
    "check_programs",
    "choose",
    "chunks",
    "cuts_into_chunks",
    "input_slots",
    "passes_records_on",
    "program_for",
    "segment_bytes",
]
