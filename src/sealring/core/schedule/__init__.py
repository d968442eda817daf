"""A collective as a small program of steps. No torch and no I/O.

table    the measured table: which algorithm for which size, world and topology
choose   chooses the algorithm of a collective, by the settings or the table
build    makes the program; ring, direct, tree and hierarchical write it
check    checks that the programs of all ranks fit together
paths    the way of each chunk through a group
levels   which exchange carries each record, where GPUs exchange records by NCCL
"""

from sealring.core.schedule.build import (
    ALGORITHMS,
    chunks,
    cuts_into_chunks,
    exchanged_bytes,
    input_slots,
    passes_records_on,
    program_for,
    segment_bytes,
)
from sealring.core.schedule.check import check_programs
from sealring.core.schedule.choose import Selection, choose, has_few_links
from sealring.core.schedule.hierarchical import Topology
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
    relayed,
)

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
