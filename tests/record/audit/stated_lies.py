"""False statements by workers or owners, or caused by the disk, made before they are signed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.record.statements.forms import (
    CheckpointRef,
    CollectiveCount,
    Commitment,
    GroupEpoch,
    Interval,
    LinkAccount,
    Named,
    Share,
)
from tests.record.audit.made_runs import (
    BATCH,
    CLEAN,
    CLEANER,
    CORPUS,
    NOW,
    RAW,
    MadeRun,
    checkpoint,
    commitment,
    sha,
    stage,
)


def data_of(one: Interval, **changes: Any) -> Interval:
    return replace(one, data=[replace(data, **changes) for data in one.data])


def link_of(
    one: Interval, peers: set[int], change: Callable[[LinkAccount], LinkAccount]
) -> Interval:
    links = [change(link) if link.peer in peers else link for link in one.links]
    return replace(one, links=links)


def forged(link: LinkAccount) -> LinkAccount:
    assert link.sent is not None
    return replace(link, sent=Commitment(link.sent.records, sha("another record")))


def other_data(made: MadeRun) -> None:
    made.each(1, lambda one: data_of(one, sha256=sha("pirated")), 1)


def other_code(made: MadeRun) -> None:
    other = Named("train.py", sha("with a back door"))
    made.each(1, lambda one: replace(one, code=replace(one.code, script=other)))


def other_count(made: MadeRun) -> None:
    made.each(
        1,
        lambda one: replace(
            one, collectives=[replace(each, count=each.count - 1) for each in one.collectives]
        ),
        1,
    )


def other_checkpoint(made: MadeRun) -> None:
    wrong = replace(made.turns[1, 1].checkpoints_out[0], sha256=sha("another model"))
    made.change(1, 1, checkpoints_out=[wrong])


def skipped_interval(made: MadeRun) -> None:
    del made.turns[1, 1]


def skipped_and_renumbered(made: MadeRun) -> None:
    late = replace(made.turns.pop((1, 2)), sequence=1)
    made.turns[1, 1] = late


def rewritten(made: MadeRun) -> None:
    """Rank 1 signs interval 1 again, after its interval 2 named the first version."""
    made.previous[1, 2] = sha("what it signed first")


def one_link(made: MadeRun) -> None:
    made.each(1, lambda one: link_of(one, {2}, forged), 1)


def all_links(made: MadeRun) -> None:
    made.each(1, lambda one: link_of(one, {0, 2, 3}, forged), 1)


def colluding(made: MadeRun) -> None:
    """Ranks 1 and 2 both state records that did not go over the link between them."""
    made.each(1, lambda one: link_of(one, {2}, forged), 1)

    def received(link: LinkAccount) -> LinkAccount:
        assert link.received is not None
        return replace(link, received=Commitment(link.received.records, sha("another record")))

    made.each(2, lambda one: link_of(one, {1}, received), 1)


def fewer_records(made: MadeRun) -> None:
    def cut(link: LinkAccount) -> LinkAccount:
        return replace(link, received=commitment(2, 1, 61))

    made.each(1, lambda one: link_of(one, {2}, cut), 2)


def rewound_link(made: MadeRun) -> None:
    def rewound(link: LinkAccount) -> LinkAccount:
        return replace(link, sent=commitment(1, 2, 15))

    made.change(1, 1, links=link_of(made.turns[1, 1], {2}, rewound).links)


def other_members(made: MadeRun) -> None:
    made.each(1, lambda one: replace(one, groups=[GroupEpoch("0", "e1", [0, 1, 2], "open")]))


def other_members_later(made: MadeRun) -> None:
    """In its last statement rank 1 lists the members in another order."""
    made.change(1, 2, groups=[GroupEpoch("0", "e1", [1, 0, 2, 3], "open")])


def unknown_member(made: MadeRun) -> None:
    ghost = GroupEpoch("x", "e5", [1, 77], "open")
    made.each(1, lambda one: replace(one, groups=[*one.groups, ghost]))


def unknown_group(made: MadeRun) -> None:
    """Rank 1 names a group of all ranks that no other rank names."""
    ghost = GroupEpoch("x", "e5", [0, 1, 2, 3], "open")
    made.each(1, lambda one: replace(one, groups=[*one.groups, ghost]))


def closed_group(made: MadeRun) -> None:
    """A group was closed before the final statements, and rank 1 does not mention it."""
    group = GroupEpoch("1", "e9", [0, 1, 2, 3], "closed")
    for rank in (0, 2, 3):
        one = made.turns[rank, 1]
        more = [*one.collectives, CollectiveCount("1", "e9", "all_reduce", 5)]
        made.change(rank, 1, groups=[*one.groups, group], collectives=more)


def links_left_out(made: MadeRun) -> None:
    """Rank 1 leaves out its links, so that traffic seems under way and counts are not compared."""
    made.change(1, 1, links=[])


def counts_back(made: MadeRun) -> None:
    one = made.turns[1, 1]
    made.change(1, 1, links=[], collectives=[replace(one.collectives[0], count=1)])


def fewer_steps(made: MadeRun) -> None:
    made.change(1, 2, end_step=25, checkpoints_out=[])


def late_start(made: MadeRun) -> None:
    """Rank 1 alone begins from a checkpoint, one that the claims allow."""
    base = CheckpointRef("base@1", 20, RAW.sha256, None)
    for sequence in range(made.count):
        one = made.turns[1, sequence]
        made.change(
            1, sequence, first_step=one.first_step + 20, end_step=one.end_step + 20,
            checkpoints_in=[] if sequence else [base], checkpoints_out=[],
        )  # fmt: skip


def read_before_written(made: MadeRun) -> None:
    """Rank 0 reads an unknown checkpoint, and rank 1 claims later that it wrote it."""
    strange = CheckpointRef("other@1", 30, sha("strange"), None)
    made.change(0, 1, checkpoints_in=[strange])
    made.change(1, 2, checkpoints_out=[*made.turns[1, 2].checkpoints_out, strange])


def other_steps(made: MadeRun) -> None:
    strange = CheckpointRef("other@1", 10, sha("strange"), None)
    made.change(1, 2, checkpoints_out=[*made.turns[1, 2].checkpoints_out, strange])


def data_as_checkpoint(made: MadeRun) -> None:
    """All ranks read pirated data, and rank 1 states that it wrote that data as a checkpoint."""
    written = CheckpointRef("other@1", 10, sha("pirated"), None)
    made.change(1, 0, checkpoints_out=[*made.turns[1, 0].checkpoints_out, written])
    for rank in range(made.world):
        made.each(rank, lambda one: data_of(one, name="other", sha256=sha("pirated")), 1)


def other_content(made: MadeRun) -> None:
    one = made.turns[1, 2].checkpoints_out[0]
    made.change(1, 2, checkpoints_out=[replace(one, content=sha("what it should be"))])


def left_out_group(made: MadeRun) -> None:
    """Rank 1's final statement names no group, so that its last counts are not compared."""
    made.change(1, made.count - 1, groups=[], links=[], collectives=[])


def failed_group(made: MadeRun) -> None:
    """Rank 1 states that its group failed, because accounts of failed groups are not compared."""
    last = made.count - 1
    one = made.turns[1, last]
    made.change(
        1, last, groups=[replace(each, state="failed") for each in one.groups],
        collectives=[replace(each, count=5) for each in one.collectives],
    )  # fmt: skip


def overlapping(made: MadeRun) -> None:
    made.each(1, lambda one: data_of(one, share=Share(BATCH, 0, 2)))


def unread(made: MadeRun) -> None:
    made.each(1, lambda one: data_of(one, share=Share(BATCH, 2, 1)), 2)


def other_order(made: MadeRun) -> None:
    made.each(1, lambda one: data_of(one, seed=8))


def expired(made: MadeRun) -> None:
    made.workers[1] = made.authority.worker(1, made.world, now=NOW - timedelta(hours=3), hours=1)


def swapped_stage_output(made: MadeRun) -> None:
    """The disk gives all ranks another dataset under the name of the stage's output."""
    for rank in range(made.world):
        made.each(rank, lambda one: data_of(one, sha256=sha("poisoned")))


def swapped_checkpoint(made: MadeRun) -> None:
    wrong = Named("model@30", sha("manifest 10"))
    made.made[2] = replace(made.made[2], inputs=[wrong])


def rolled_back(made: MadeRun) -> None:
    """Rank 1 alone is given the checkpoint of step 10, while the run goes on from step 20."""
    for rank in range(made.world):
        for sequence in range(made.count):
            one = made.turns[rank, sequence]
            first, end = one.first_step + 20, one.end_step + 20
            read = [checkpoint(10 if rank == 1 else 20)] if sequence == 0 else []
            made.change(
                rank, sequence, first_step=first, end_step=end, checkpoints_in=read,
                checkpoints_out=[checkpoint(end)],
            )  # fmt: skip
    made.made[2] = replace(made.made[2], inputs=[Named("model@50", checkpoint(50).sha256)])


def circle(made: MadeRun) -> None:
    made.made.append(stage("untokenize", "stage", [CORPUS], [CLEAN], CLEANER))


def made_twice(made: MadeRun) -> None:
    pirated = Named("pirated", sha("pirated"))
    made.made.append(stage("tokenize-again", "stage", [pirated], [CORPUS], CLEANER))


def one_key(made: MadeRun) -> None:
    """One worker is both rank 1 and rank 2, with a certificate for each."""
    key = Ed25519PrivateKey.generate()
    for rank in (1, 2):
        made.workers[rank] = made.authority.worker(rank, made.world, key=key)


def started_again(made: MadeRun, ranks: Sequence[int] = range(4)) -> None:
    """New processes run from interval 1 on, like a second run in an unfinished run's folder."""
    for rank in ranks:
        made.each(rank, _in_a_new_group, 1)


def _in_a_new_group(one: Interval) -> Interval:
    """Return the statement with a new group's epoch, whose counts start again from zero."""

    def fewer(way: Commitment | None) -> Commitment | None:
        return None if way is None else replace(way, records=way.records - 30)

    return replace(
        one,
        groups=[replace(group, epoch="e2") for group in one.groups],
        collectives=[replace(each, epoch="e2", count=each.count - 10) for each in one.collectives],
        links=[
            replace(link, epoch="e2", sent=fewer(link.sent), received=fewer(link.received))
            for link in one.links
        ],
    )
