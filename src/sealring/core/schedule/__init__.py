"""A collective as a small program of steps; pure, no torch, no I/O.

table    which algorithm for which size, world and topology, as measured
choose   the algorithm of a collective, from that table or as it was set
layout   where a tensor is cut into chunks, and chunks into segments
build    the program, written by ring, direct, tree or hierarchical
check    whether the programs of all ranks fit together
relayed  a program in which nothing is published or passed on
paths    the way of each chunk through a group
levels   in which exchange each record goes, where GPUs exchange records
"""

from sealring.core.schedule.build import (
    ALGORITHMS,
    cuts_into_chunks,
    input_slots,
    passes_records_on,
    program_for,
)
from sealring.core.schedule.check import check_programs
from sealring.core.schedule.choose import Selection, choose, has_few_links
from sealring.core.schedule.hierarchical import Topology
from sealring.core.schedule.layout import chunks, exchanged_bytes, segment_bytes
from sealring.core.schedule.levels import Levels, levels_for
from sealring.core.schedule.program import (
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
from sealring.core.schedule.relayed import relayed

__all__ = [
    "ALGORITHMS",
    "CALLED",
    "REDUCING",
    "ROOTED",
    "Action",
    "Algorithm",
    "Levels",
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
    "exchanged_bytes",
    "has_few_links",
    "input_slots",
    "levels_for",
    "passes_records_on",
    "program_for",
    "relayed",
    "segment_bytes",
]
