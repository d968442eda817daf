"""Every lie is found, and the audit names the party, the record and what contradicts it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sealring.record.audit import data
from sealring.record.audit.audit import AuditQuestion, AuditResult, Status, audit
from sealring.record.audit.claims import Aggregation, RunClaims, StageClaim
from sealring.record.audit.findings import Fault, Said
from sealring.record.audit.records import AuditTrust
from sealring.record.statements.forms import CollectiveCount, GroupEpoch, Named
from tests.record.audit.folder_lies import respelled
from tests.record.audit.lies import LIES, Lie
from tests.record.audit.made_runs import (
    CLEANER,
    MODEL,
    RAW,
    SCRIPT,
    MadeRun,
    checkpoint,
    commitment,
    sha,
)
from tests.record.audit.stated_lies import closed_group, colluding, started_again

CLAIMS = RunClaims(
    trained_only_on=frozenset({RAW.sha256}),
    stages=(StageClaim("clean", CLEANER.sha256), StageClaim("tokenize", None)),
    code={"train.py": frozenset({SCRIPT.sha256})},
    ranks=4,
    aggregation=Aggregation(frozenset({"all_reduce"}), True),
    no_gaps=True,
)


def ask(folder: Path, trust: AuditTrust, model: bytes = MODEL) -> AuditResult:
    file = folder.with_name("model.bin")
    file.write_bytes(model)
    return audit(folder, trust, AuditQuestion(CLAIMS, file))


def answers(result: AuditResult) -> dict[str, Said]:
    return {answer.claim: answer.said for answer in result.answers}


def test_an_honest_run_is_shown(tmp_path: Path) -> None:
    made = MadeRun()
    result = ask(made.write(tmp_path / "run").path, made.trust)
    assert result.findings == ()
    assert answers(result) == dict.fromkeys(
        ("trained_only_on", "stages", "code", "ranks", "aggregation", "no_gaps", "model"), Said.YES
    )
    assert result.status is Status.SHOWN
    assert (len(result.payloads), result.ranks, result.intervals) == (15, 4, 3)


@pytest.mark.parametrize("name", LIES)
@pytest.mark.threat("A1", "A6")
def test_a_lie_is_found_and_named(name: str, tmp_path: Path) -> None:
    lie = LIES[name]
    made = MadeRun()
    lie.before(made)
    run = made.write(tmp_path / "run")
    trust = lie.after(made, run) or made.trust
    result = ask(run.path, trust)
    assert result.status is Status.REFUTED
    found = [(finding.fault, named(finding.parties)) for finding in result.findings]
    assert sorted(found) == sorted(lie.found), [one.text for one in result.findings]
    said = answers(result)
    assert {claim: said[claim] for claim in lie.refuted} == dict.fromkeys(lie.refuted, Said.NO)
    check_records(lie, made, result)


def named(parties: tuple[str, ...]) -> tuple[str, ...]:
    """Replace an owner's name, which is made from a key that differs in each test."""
    return tuple("OWNER" if party.startswith("the owner ") else party for party in parties)


def check_records(lie: Lie, made: MadeRun, result: AuditResult) -> None:
    if not lie.blamed:
        return
    first = next(one for one in result.findings if one.fault is lie.found[0][0])
    assert set(first.records) == {made.digests[place] for place in lie.blamed}
    assert {made.digests[place] for place in lie.against} <= set(first.against)
    behind = [node for node in result.graph.nodes.values() if node.faulty]
    assert {node.key for node in behind} >= {f"i:{rank}:{turn}" for rank, turn in lie.blamed}


@pytest.mark.threat("A1")
def test_a_model_file_that_was_swapped(tmp_path: Path) -> None:
    made = MadeRun()
    result = ask(made.write(tmp_path / "run").path, made.trust, b"other weights")
    (finding,) = result.findings
    assert (finding.fault, finding.parties) == (Fault.MODEL, ("the holder of the file",))
    assert finding.against == (made.made_digests["export"],)
    assert answers(result)["model"] is Said.NO
    assert result.status is Status.REFUTED


def test_a_statement_that_the_disk_loses_is_still_in_the_log(tmp_path: Path) -> None:
    made = MadeRun()
    run = made.write(tmp_path / "run")
    run.statement_path("rank-1-1").unlink()
    assert ask(run.path, made.trust).status is Status.SHOWN


def test_neighbours_that_collude_are_not_found(tmp_path: Path) -> None:
    # Both ends of a link hold its key, as docs/audit-findings.md says.
    made = MadeRun()
    colluding(made)
    result = ask(made.write(tmp_path / "run").path, made.trust)
    assert (result.findings, result.status) == ((), Status.SHOWN)


def test_a_log_that_was_cut_is_noticed_without_a_witness_by_its_missing_end(tmp_path: Path) -> None:
    made = MadeRun()
    run = made.write(tmp_path / "run")
    LIES["cuts the log's end"].after(made, run)
    result = ask(run.path, made.trust)  # no checkpoint that was seen elsewhere
    assert result.findings == ()
    assert answers(result)["no_gaps"] is Said.NO
    assert answers(result)["model"] is Said.NO


def test_a_group_that_failed_may_end_differently_at_its_ends(tmp_path: Path) -> None:
    """When a worker is started again, the old group's last records may reach one end only."""
    made = MadeRun(world=2, count=3)
    for rank in range(2):
        for sequence in range(2):
            one = made.turns[rank, sequence]
            old = [replace(group, epoch="e0", state="failed") for group in one.groups]
            links = [replace(link, epoch="e0") for link in one.links]
            counts = [replace(count, epoch="e0") for count in one.collectives]
            made.change(rank, sequence, groups=old, links=links, collectives=counts)
    ahead = made.turns[0, 1].links[0]
    made.change(0, 1, links=[replace(ahead, sent=commitment(0, 1, 63))])
    result = audit(made.write(tmp_path / "run").path, made.trust)
    assert result.findings == ()


@pytest.mark.threat("A6")
def test_a_run_that_is_started_again_from_a_checkpoint_is_not_accused(tmp_path: Path) -> None:
    made = MadeRun()
    started_again(made)
    for rank in range(4):
        made.change(rank, 1, checkpoints_in=[checkpoint(10)])
    assert ask(made.write(tmp_path / "run").path, made.trust).status is Status.SHOWN


def test_a_group_that_was_closed_earlier_is_compared_as_of_then(tmp_path: Path) -> None:
    made = MadeRun(world=2, count=3)
    for rank in range(2):
        one = made.turns[rank, 1]
        extra = [replace(link, group="1", epoch="e9") for link in one.links]
        group = replace(one.groups[0], name="1", epoch="e9", state="closed")
        made.change(rank, 1, groups=[*one.groups, group], links=[*one.links, *extra])
        last = made.turns[rank, 2]
        made.change(rank, 2, groups=[*last.groups, group], links=[*last.links, *extra])
    for sequence in (1, 2):
        first, second = made.turns[0, sequence].links
        cut = replace(second, received=commitment(1, 0, 59))
        made.change(0, sequence, links=[first, cut])
    (finding,) = audit(made.write(tmp_path / "run").path, made.trust).findings
    assert (finding.fault, finding.parties) == (Fault.LINK, ("rank 1", "rank 0"))


def test_a_copy_in_another_spelling_accuses_no_rank(tmp_path: Path) -> None:
    made = MadeRun()
    run = made.write(tmp_path / "run")
    respelled(made, run)
    result = audit(run.path, made.trust)
    assert [finding.fault for finding in result.findings] == [Fault.UNREADABLE]


def test_a_world_that_no_job_has_does_not_hold_up_the_audit(tmp_path: Path) -> None:
    made = MadeRun(world=2, count=2)
    for rank in range(2):
        made.workers[rank] = made.authority.worker(rank, None)
        made.each(rank, lambda one: replace(one, world=1 << 62))
    result = audit(made.write(tmp_path / "run").path, made.trust, AuditQuestion(CLAIMS))
    assert {finding.fault for finding in result.findings} == {Fault.UNREADABLE}
    assert len(result.findings) == 4


def test_very_many_ranges_do_not_hold_up_the_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "MAX_COMPARED", 1000)
    monkeypatch.setattr(data, "_COMPARED_EACH", 0)
    made = MadeRun(world=2, count=2)
    for rank in range(2):
        one = made.turns[rank, 0]
        ranges = [replace(one.data[0], first=n, end=1000 - n) for n in range(200)]
        made.change(rank, 0, data=ranges)
    found = audit(made.write(tmp_path / "run").path, made.trust).findings
    assert found[-1].text == "the ranges of corpus overlap in too many ways to be compared"


@pytest.mark.threat("A1")
def test_a_model_from_a_strangers_checkpoint_too(tmp_path: Path) -> None:
    made = MadeRun()
    export = made.made[2]
    stranger = Named("stranger@1", sha("stranger"))
    made.made[2] = replace(export, inputs=[*export.inputs, stranger])
    (answer,) = [
        one for one in ask(made.write(tmp_path / "run").path, made.trust).answers
        if one.claim == "model"
    ]  # fmt: skip
    assert answer.said is Said.NO
    assert "exported from stranger@1 too, which no rank of this run wrote" in answer.text


def test_counts_of_a_group_that_one_rank_says_has_failed_are_not_agreed_on(tmp_path: Path) -> None:
    """It was closed in mid-run, where ranks may differ about how it ended."""
    made = MadeRun()
    for rank in range(4):
        one = made.turns[rank, 1]
        group = GroupEpoch("1", "e9", [0, 1, 2, 3], "failed" if rank == 1 else "closed")
        count = CollectiveCount("1", "e9", "all_reduce", 1 if rank == 1 else 5)
        made.change(
            rank, 1, groups=[*one.groups, group], collectives=[*one.collectives, count]
        )  # fmt: skip
    result = ask(made.write(tmp_path / "run").path, made.trust)
    (answer,) = [one for one in result.answers if one.claim == "aggregation"]
    assert answer.said is Said.NOT_SHOWN
    assert "of group 1, not all members give the same last count" in answer.text


def test_a_process_that_was_started_again_need_not_know_a_closed_group(tmp_path: Path) -> None:
    made = MadeRun()
    closed_group(made)
    for rank in range(4):
        made.change(rank, 2, checkpoints_in=[checkpoint(20)])
    result = audit(made.write(tmp_path / "run").path, made.trust)
    assert [one for one in result.findings if one.fault is Fault.GROUP] == []
