"""The lies under test: who tells each one, what it changes, and what the audit must report.

`before` changes what is stated before it is signed. `after` changes the folder. `found` lists every
finding expected, by its fault and the parties at fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sealring.record.audit.findings import Fault
from sealring.record.audit.records import AuditTrust
from sealring.record.statements.run_folder import RunFolder
from tests.record.audit import folder_lies as folder
from tests.record.audit import stated_lies as stated
from tests.record.audit.made_runs import JOB, MadeRun

Found = tuple[Fault, tuple[str, ...]]
DISK = "the disk"


@dataclass(frozen=True)
class Lie:
    who: str
    found: Sequence[Found]
    before: Callable[[MadeRun], None] = lambda made: None
    after: Callable[[MadeRun, RunFolder], AuditTrust | None] = lambda made, run: None
    blamed: list[tuple[int, int]] = field(default_factory=list)
    """(rank, interval) of the statements that the first finding must name as wrong."""
    against: list[tuple[int, int]] = field(default_factory=list)
    """(rank, interval) of the statements that it must name as contradicting them."""
    refuted: tuple[str, ...] = ()
    """Claims that must be answered with no."""


RANK_1, RANK_2 = "rank 1", "rank 2"
ALL = [f"rank {rank}" for rank in range(4)]
OTHERS = [(0, 0), (2, 0), (3, 0)]


def author(rank: int, job: str = JOB) -> str:
    return f"the author of the file, which names rank {rank} of {job}"


LIES: dict[str, Lie] = {
    "reads other data": Lie(
        "a worker",
        [(Fault.DATA, (RANK_1,)), (Fault.TRANSFORMATION, (RANK_1, DISK))],
        stated.other_data,
        refuted=("trained_only_on", "stages"),
    ),
    "runs other code": Lie(
        "a worker",
        [(Fault.DISAGREEMENT, (RANK_1,))],
        stated.other_code,
        blamed=[(1, 0)],
        against=OTHERS,
        refuted=("code",),
    ),
    "counts other collectives": Lie(
        "a worker",
        [(Fault.COUNTS, (RANK_1,))],
        stated.other_count,
        blamed=[(1, 1)],
        against=[(0, 1), (2, 1), (3, 1)],
        refuted=("aggregation",),
    ),
    "names another checkpoint": Lie(
        "a worker",
        [(Fault.CHECKPOINT, (RANK_1,))],
        stated.other_checkpoint,
        blamed=[(1, 1)],
        against=[(0, 1), (2, 1), (3, 1)],
    ),
    "skips an interval": Lie(
        "a worker",
        [(Fault.GAP, (RANK_1,)), (Fault.DATA, (RANK_1,))],
        stated.skipped_interval,
        blamed=[(1, 2)],
        against=[(1, 0)],
        refuted=("no_gaps",),
    ),
    "skips an interval and renumbers": Lie(
        "a worker",
        [(Fault.GAP, (RANK_1,)), (Fault.DATA, (RANK_1,))],
        stated.skipped_and_renumbered,
        blamed=[(1, 1)],
        against=[(1, 0)],
        refuted=("no_gaps",),
    ),
    "signs two statements for one interval": Lie(
        "a worker",
        [(Fault.TWO_STATEMENTS, (RANK_1,))],
        after=folder.two_statements,
        refuted=("no_gaps",),
    ),
    "signs an earlier interval again": Lie(
        "a worker",
        [(Fault.BROKEN_CHAIN, (RANK_1,))],
        stated.rewritten,
        blamed=[(1, 2)],
        against=[(1, 1)],
        refuted=("no_gaps",),
    ),
    "alters the account of one link": Lie(
        "a worker",
        [(Fault.LINK, (RANK_1, RANK_2))],
        stated.one_link,
        blamed=[(1, 1)],
        against=[(2, 1)],
        refuted=("aggregation",),
    ),
    "alters the accounts of all its links": Lie(
        "a worker",
        [(Fault.LINK, (RANK_1,))] * 3,
        stated.all_links,
        blamed=[(1, 1)],
        against=[(0, 1)],
        refuted=("aggregation",),
    ),
    "counts fewer records of a link": Lie(
        "a worker",
        [(Fault.LINK, (RANK_2, RANK_1))],
        stated.fewer_records,
        blamed=[(2, 2)],
        against=[(1, 2)],
        refuted=("aggregation",),
    ),
    "rewinds a link": Lie(
        "a worker",
        [(Fault.LINK, (RANK_1,))],
        stated.rewound_link,
        blamed=[(1, 1)],
        against=[(1, 0)],
        refuted=("aggregation",),
    ),
    "names other members of a group": Lie(
        "a worker",
        [(Fault.GROUP, (RANK_1,))],
        stated.other_members,
        blamed=[(1, 0)],
        against=OTHERS,
        refuted=("aggregation",),
    ),
    "leaves a group out at the end": Lie(
        "a worker",
        [(Fault.GROUP, (RANK_1,))],
        stated.left_out_group,
        blamed=[(1, 2)],
        against=[(0, 2), (2, 2), (3, 2)],
        refuted=("aggregation",),
    ),
    "says that a group failed": Lie(
        "a worker",
        [(Fault.GROUP, (RANK_1,)), (Fault.COUNTS, (RANK_1,))],
        stated.failed_group,
        blamed=[(1, 2)],
        against=[(0, 2), (2, 2), (3, 2)],
        refuted=("aggregation",),
    ),
    "begins later than the others": Lie(
        "a worker",
        [(Fault.GAP, (RANK_1,)), (Fault.DISAGREEMENT, (RANK_1,))],
        stated.late_start,
        blamed=[(1, 0)],
        against=OTHERS,
        refuted=("no_gaps",),
    ),
    "does fewer steps": Lie(
        "a worker",
        [(Fault.DISAGREEMENT, (RANK_1,))],
        stated.fewer_steps,
        blamed=[(1, 2)],
        against=[(0, 2), (2, 2), (3, 2)],
        refuted=(),
    ),
    "leaves its links out in between": Lie(
        "a worker",
        [(Fault.LINK, (RANK_1,))],
        stated.links_left_out,
        blamed=[(1, 1)],
        against=[(1, 0)],
        refuted=("aggregation",),
    ),
    "counts back": Lie(
        "a worker",
        [(Fault.COUNTS, (RANK_1,)), (Fault.LINK, (RANK_1,))],
        stated.counts_back,
        blamed=[(1, 1)],
        against=[(1, 0)],
        refuted=("aggregation",),
    ),
    "names other members of a group later": Lie(
        "a worker",
        [(Fault.GROUP, (RANK_1,))],
        stated.other_members_later,
        blamed=[(1, 2)],
        against=[(1, 0)],
        refuted=("aggregation",),
    ),
    "names a member that the job does not have": Lie(
        "a worker",
        [(Fault.GROUP, (RANK_1,))],
        stated.unknown_member,
        blamed=[(1, 0)],
        against=[],
        refuted=("aggregation",),
    ),
    "names a group that no other rank knows": Lie(
        "a worker",
        [(Fault.GROUP, (RANK_1,))],
        stated.unknown_group,
        blamed=[(1, 2)],
        against=[(0, 2), (2, 2), (3, 2)],
        refuted=("aggregation",),
    ),
    "leaves out a group that was closed": Lie(
        "a worker",
        [(Fault.GROUP, (RANK_1,))],
        stated.closed_group,
        blamed=[(1, 2)],
        against=[(0, 1), (2, 1), (3, 1)],
        refuted=("aggregation",),
    ),
    "says later that it wrote what another read": Lie(
        "a worker",
        [(Fault.CHECKPOINT, ("rank 0", RANK_1))],
        stated.read_before_written,
        blamed=[(0, 1)],
        against=[(1, 2)],
        refuted=("trained_only_on",),
    ),
    "writes a checkpoint of other steps": Lie(
        "a worker",
        [(Fault.CHECKPOINT, (RANK_1,))],
        stated.other_steps,
        blamed=[(1, 2)],
        against=[],
        refuted=("trained_only_on",),
    ),
    "passes data off as a checkpoint": Lie(
        "a worker",
        [(Fault.CHECKPOINT, (RANK_1,))],
        stated.data_as_checkpoint,
        blamed=[(1, 0)],
        against=[(0, 1), (2, 1), (3, 1)],
        refuted=("trained_only_on",),
    ),
    "names another content of a checkpoint": Lie(
        "a worker",
        [(Fault.CHECKPOINT, (RANK_1,))],
        stated.other_content,
        blamed=[(1, 2)],
        against=[(0, 2), (2, 2), (3, 2)],
        refuted=("trained_only_on",),
    ),
    "reads another rank's samples": Lie(
        "a worker",
        [(Fault.DATA, (RANK_1, "rank 0"))],
        stated.overlapping,
        refuted=("trained_only_on",),
    ),
    "leaves samples out": Lie(
        "a worker",
        [(Fault.DATA, (RANK_1,))],
        stated.unread,
        refuted=("trained_only_on",),
    ),
    "reads in another order": Lie(
        "a worker",
        [(Fault.DATA, (RANK_1,))],
        stated.other_order,
        blamed=[(1, 0)],
        against=OTHERS,
        refuted=("trained_only_on",),
    ),
    "starts again with all others, without a checkpoint": Lie(
        "a worker",
        [(Fault.GAP, tuple(ALL))],
        stated.started_again,
        blamed=[(rank, 1) for rank in range(4)],
        against=[(rank, 0) for rank in range(4)],
        refuted=("no_gaps",),
    ),
    "signs for another rank": Lie(
        "a worker",
        [(Fault.FORGED, (author(1),))],
        after=folder.signed_for_another_rank,
        refuted=("no_gaps",),
    ),
    "signs with an expired certificate": Lie(
        "a worker",
        [(Fault.OUTSIDE_DATES, (author(1),))] * 3
        + [(Fault.GAP, (RANK_1,)), (Fault.DATA, (RANK_1,))],
        stated.expired,
        refuted=("no_gaps", "ranks"),
    ),
    "signs with a certificate of another job": Lie(
        "a worker",
        [(Fault.OTHER_JOB, ("rank 1 of another", DISK))],
        after=folder.other_job,
        refuted=("no_gaps",),
    ),
    "shows a statement of another run": Lie(
        "a worker",
        [(Fault.OTHER_JOB, ("rank 1 of job", DISK))],
        after=folder.other_run,
        refuted=("no_gaps",),
    ),
    "was never admitted": Lie(
        "a stranger",
        [(Fault.FORGED, (author(1),))],
        after=folder.unadmitted,
        refuted=("no_gaps",),
    ),
    "signs a stage with an unknown key": Lie(
        "a stranger",
        [(Fault.FORGED, ("the author of the file",))],
        after=folder.unknown_owner,
        refuted=("no_gaps",),
    ),
    "changes a statement": Lie(
        "the disk",
        [(Fault.NOT_LOGGED, (author(1), "the log's owner")), (Fault.FORGED, (author(1),))],
        after=folder.changed_statement,
        refuted=("no_gaps",),
    ),
    "replaces a statement by garbage": Lie(
        "the disk",
        [
            (Fault.NOT_LOGGED, ("the author of the file", "the log's owner")),
            (Fault.UNREADABLE, ("the author of the file",)),
        ],
        after=folder.garbage,
        refuted=("no_gaps",),
    ),
    "adds a true statement of another run": Lie(
        "the disk",
        [
            (Fault.NOT_LOGGED, (author(1), "the log's owner")),
            (Fault.OTHER_JOB, ("rank 1 of job", DISK)),
        ],
        after=folder.added_of_other_run,
        refuted=("no_gaps",),
    ),
    "changes an entry of the log": Lie(
        "the disk",
        [(Fault.LOG_REFUSED, (DISK, "the log's owner"))],
        after=folder.changed_entry,
        refuted=("no_gaps",),
    ),
    "swaps a stage's output": Lie(
        "the disk",
        [(Fault.TRANSFORMATION, (party, DISK)) for party in ALL],
        stated.swapped_stage_output,
        refuted=("trained_only_on",),
    ),
    "rolls a checkpoint back": Lie(
        "the disk",
        [(Fault.CHECKPOINT, (RANK_1, DISK)), (Fault.CHECKPOINT, (RANK_1,))],
        stated.rolled_back,
        blamed=[(1, 0)],
        refuted=("trained_only_on",),
    ),
    "exports another checkpoint": Lie(
        "the broker's operator",
        [(Fault.CHECKPOINT, ("OWNER", DISK))],
        stated.swapped_checkpoint,
        refuted=("model",),
    ),
    "gives two accounts of one dataset": Lie(
        "the broker's operator",
        [(Fault.TRANSFORMATION, ("OWNER",))],
        stated.made_twice,
        refuted=("trained_only_on", "stages"),
    ),
    "lets stages form a circle": Lie(
        "the broker's operator",
        [(Fault.TRANSFORMATION, ("OWNER",)), (Fault.CYCLE, ("the signers of these records",))],
        stated.circle,
        refuted=("no_gaps",),
    ),
    "gives two ranks one key": Lie(
        "the broker's operator",
        [(Fault.SHARED_KEY, (RANK_1, RANK_2, "their authority"))],
        stated.one_key,
        blamed=[(1, 0), (2, 0)],
        refuted=("ranks",),
    ),
    "keeps a statement out of the log": Lie(
        "the log's owner",
        [(Fault.NOT_LOGGED, ("the author of the file", "the log's owner"))],
        after=folder.not_logged,
        refuted=("no_gaps",),
    ),
    "cuts the log's end": Lie(
        "the log's owner",
        [(Fault.LOG_REFUSED, ("the log's owner", DISK))],
        after=folder.cut,
        refuted=("no_gaps",),
    ),
    "forks the log": Lie(
        "the log's owner, and a witness",
        [
            (Fault.LOG_REFUSED, ("the log's owner",)),
            (Fault.WITNESS_FORKED, ("the witness example.org/w0",)),
        ],
        after=folder.fork,
        refuted=("no_gaps", "stages"),
    ),
    "has too few witnesses": Lie(
        "the log's owner",
        [(Fault.LOG_REFUSED, ("the log's owner", "its witnesses"))],
        after=folder.no_quorum,
        refuted=("no_gaps",),
    ),
}
