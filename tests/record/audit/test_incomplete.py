"""An audit does not answer yes about what is missing from the records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from sealring.record.audit.audit import AuditQuestion, AuditResult, audit
from sealring.record.audit.claims import Aggregation, PrivacyBudget, RunClaims, StageClaim
from sealring.record.audit.findings import Fault, Said
from sealring.record.statements import forms
from sealring.record.statements.forms import Interval, Named
from tests.record.audit.folder_lies import changed_entry
from tests.record.audit.made_runs import CLEANER, RAW, SCRIPT, MadeRun, checkpoint, sha
from tests.record.audit.stated_lies import data_of, skipped_interval

OF_ALL = RunClaims(
    trained_only_on=frozenset({RAW.sha256}),
    stages=(StageClaim("clean", CLEANER.sha256), StageClaim("tokenize", None)),
    code={"train.py": frozenset({SCRIPT.sha256})},
    aggregation=Aggregation(frozenset({"all_reduce"}), True),
    privacy=PrivacyBudget(Decimal(8), Decimal(1)),
)
"""Claims about the whole run."""


def run_of(count: int = 3) -> MadeRun:
    made = MadeRun(world=2, count=count)
    private(made, "1")
    return made


def private(made: MadeRun, epsilon: str, first: int = 0) -> None:
    said = forms.Privacy("dp-sgd", epsilon, "0", "{}")
    for_all(made, lambda one: replace(one, privacy=said), first)


def for_all(made: MadeRun, change: Callable[[Interval], Interval], first: int = 0) -> None:
    for rank in range(made.world):
        made.each(rank, change, first)


def ask(made: MadeRun, folder: Path, claims: RunClaims = OF_ALL) -> AuditResult:
    return audit(made.write(folder / "run").path, made.trust, AuditQuestion(claims))


def answers(result: AuditResult) -> dict[str, Said]:
    return {one.claim: one.said for one in result.answers}


NAMES = ("trained_only_on", "stages", "code", "aggregation", "privacy")


def test_whole_and_honest(tmp_path: Path) -> None:
    result = ask(run_of(), tmp_path)
    assert (answers(result), result.findings) == (dict.fromkeys(NAMES, Said.YES), ())


def cut_off(made: MadeRun) -> None:
    for_all(made, lambda one: replace(one, final=False))


def without_a_beginning(made: MadeRun) -> None:
    def later(one: Interval) -> Interval:
        return replace(one, first_step=one.first_step + 10, end_step=one.end_step + 10)

    for_all(made, lambda one: replace(later(one), checkpoints_out=[]))


def jump(made: MadeRun) -> None:
    """The ranks end by reading a checkpoint of a later step, to excuse the steps between."""
    outside = [replace(checkpoint(40), name="other@1", sha256=sha("other"))]
    last = made.count - 1
    for rank in range(made.world):
        made.change(rank, last, first_step=40, end_step=50, checkpoints_in=outside)


@pytest.mark.parametrize("what", [cut_off, without_a_beginning, jump, skipped_interval])
@pytest.mark.threat("A10")
def test_missing_records_could_refute_what_is_about_all(
    what: Callable[[MadeRun], None], tmp_path: Path
) -> None:
    made = run_of()
    what(made)
    said = answers(ask(made, tmp_path, replace(OF_ALL, no_gaps=True)))
    assert said.pop("no_gaps") is Said.NO
    assert Said.YES not in said.values()


@pytest.mark.threat("A10")
def test_a_log_that_is_refused(tmp_path: Path) -> None:
    made = run_of()
    run = made.write(tmp_path / "run")
    changed_entry(made, run)
    result = audit(run.path, made.trust, AuditQuestion(OF_ALL))
    assert answers(result) == dict.fromkeys(NAMES, Said.NOT_SHOWN)


@pytest.mark.parametrize(
    ("change", "party"),
    [(without_a_beginning, "rank 0"), (jump, "rank 0")],
)
@pytest.mark.threat("A10")
def test_steps_that_no_statement_has_are_named(
    change: Callable[[MadeRun], None], party: str, tmp_path: Path
) -> None:
    made = run_of()
    change(made)
    gaps = [one for one in ask(made, tmp_path).findings if one.fault is Fault.GAP]
    assert [one.parties for one in gaps] == [(party,), ("rank 1",)]


def test_a_script_with_the_name_of_another_claim_is_compared(tmp_path: Path) -> None:
    made = run_of()
    other = Named("packages", sha("another script"))
    for_all(made, lambda one: replace(one, code=replace(one.code, script=other)))
    listed = {"train.py": frozenset({SCRIPT.sha256}), "packages": frozenset({sha("packages")})}
    (answer,) = ask(made, tmp_path, RunClaims(code=listed)).answers
    assert answer.said is Said.NO
    assert sha("another script")[:12] in answer.text


def test_collectives_of_one_interval_do_not_stand_for_another(tmp_path: Path) -> None:
    made = run_of()
    for_all(
        made,
        lambda one: replace(one, collectives=[replace(each, count=30) for each in one.collectives]),
    )
    (answer,) = ask(made, tmp_path, RunClaims(aggregation=OF_ALL.aggregation)).answers
    assert answer.said is Said.NOT_SHOWN
    assert "interval 1 (steps 10 to 20) counts 0 new collectives" in answer.text


def test_messages_are_no_aggregation(tmp_path: Path) -> None:
    def with_messages(one: Interval) -> Interval:
        return replace(one, links=[*one.links, *(replace(x, kind="message") for x in one.links)])

    for kinds, said in (({"all_reduce"}, Said.NO), ({"all_reduce", "message"}, Said.YES)):
        made = run_of()
        for_all(made, with_messages)
        claims = RunClaims(aggregation=Aggregation(frozenset(kinds), True))
        (answer,) = ask(made, tmp_path / str(len(kinds)), claims).answers
        assert answer.said is said, answer.text


def test_links_of_a_group_that_failed_are_not_compared_to_their_end(tmp_path: Path) -> None:
    made = run_of()
    for_all(
        made,
        lambda one: replace(
            one,
            groups=[replace(each, state="failed") for each in one.groups],
            links=[
                replace(
                    each, sent=replace(each.sent, records=each.sent.records + 1, sha256=sha(""))
                )
                for each in one.links
                if each.sent is not None
            ],
        ),
        2,
    )
    (answer,) = ask(made, tmp_path, RunClaims(aggregation=OF_ALL.aggregation)).answers
    assert answer.said is Said.NOT_SHOWN
    assert "0 could be compared to their end" in answer.text


def test_ranges_without_a_sample_are_no_data(tmp_path: Path) -> None:
    made = run_of()
    for_all(made, lambda one: data_of(one, first=0, end=0))
    (answer,) = ask(made, tmp_path, RunClaims(trained_only_on=OF_ALL.trained_only_on)).answers
    assert answer.said is Said.NOT_SHOWN


def test_privacy_that_was_spent_is_not_taken_back(tmp_path: Path) -> None:
    made = run_of()
    private(made, "9", 1)
    private(made, "1", 2)
    (answer,) = ask(made, tmp_path, RunClaims(privacy=OF_ALL.privacy)).answers
    assert answer.said is Said.NO
    assert "interval 1" in answer.text


def recovered(made: MadeRun, step: int, **last: Any) -> None:
    """The last interval goes back to a checkpoint of `step`, and repeats the steps after it."""
    end = made.count - 1
    before = made.turns[0, end - 1].end_step
    for rank in range(made.world):
        one = data_of(
            made.turns[rank, end], first=step * made.world * 2, end=before * made.world * 2
        )
        made.turns[rank, end] = replace(
            one, first_step=step, end_step=before,
            checkpoints_in=[replace(checkpoint(10), step=step)], checkpoints_out=[], **last,
        )  # fmt: skip


def test_samples_before_the_checkpoint_that_a_run_went_back_to_still_count(tmp_path: Path) -> None:
    made = run_of(4)
    recovered(made, 10)
    assert ask(made, tmp_path / "honest").findings == ()
    made = run_of(4)
    recovered(made, 10)
    share = made.turns[1, 0].data[0].share
    assert share is not None
    made.turns[1, 0] = data_of(made.turns[1, 0], share=replace(share, length=1))
    found = ask(made, tmp_path / "lie").findings
    assert [(one.fault, one.parties) for one in found] == [(Fault.DATA, ("rank 0", "rank 1"))]


def test_a_run_that_went_back_to_the_middle_of_an_interval_is_not_accused(tmp_path: Path) -> None:
    made = run_of(4)
    recovered(made, 15)
    for rank in range(2):
        made.change(
            rank, 3, checkpoints_in=[replace(checkpoint(15), name="other@1", sha256=sha("o"))]
        )
    assert [one for one in ask(made, tmp_path).findings if one.fault is Fault.DATA] == []


def test_an_older_checkpoint_under_a_later_step(tmp_path: Path) -> None:
    """A reader names the step it continues at, and a writer the step it had reached."""
    made = run_of()
    for rank in range(2):
        made.change(rank, 2, checkpoints_in=[replace(checkpoint(10), step=20)])
    found = ask(made, tmp_path).findings
    assert [(one.fault, one.parties) for one in found] == [
        (Fault.CHECKPOINT, ("rank 0", "the disk")),
        (Fault.CHECKPOINT, ("rank 1", "the disk")),
    ]
    assert set(found[0].against) == {made.digests[0, 0], made.digests[1, 0]}
