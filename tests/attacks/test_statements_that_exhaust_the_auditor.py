"""An admitted worker signs small records that could cost an auditor far more than their size.

Each folder here is small. The tests measure peak memory, and count work as executed opcodes.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from sealring.limits import MAX_WORLD
from sealring.record.audit.audit import AuditQuestion, AuditResult, audit
from sealring.record.audit.chains import check_chains
from sealring.record.audit.claims import Aggregation, RunClaims
from sealring.record.audit.data import check_data
from sealring.record.audit.findings import MAX_AGAINST, MAX_TEXT, Fault, Finding, absent_ranks
from sealring.record.audit.graph import NodeKind
from sealring.record.audit.page import page
from sealring.record.audit.records import RankInterval, Records
from sealring.record.replay import unrepeatable
from sealring.record.statements.forms import (
    CheckpointRef,
    Commitment,
    GroupEpoch,
    Interval,
    LinkAccount,
    Named,
    Share,
    Worker,
)
from tests.record.audit.made_runs import CLEANER, RAW, MadeRun, checkpoint, sha, stage


def audited(
    made: MadeRun, path: Path, question: AuditQuestion | None = None
) -> tuple[AuditResult, int]:
    """Returns the findings and the peak number of bytes that were allocated."""
    run = made.write(path)
    tracemalloc.start()
    try:
        result = audit(run.path, made.trust, question)
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def of(result: AuditResult, fault: Fault) -> list[Finding]:
    return [one for one in result.findings if one.fault is fault]


def overlapping(world: int, count: int) -> MadeRun:
    """Makes one statement with overlapping ranges, whose shares all have different periods."""
    made = MadeRun(world=1, count=1)
    made.workers[0] = made.authority.worker(0, None)  # its certificate names no world
    one = made.turns[0, 0].data[0]
    data = [
        replace(one, first=at, end=1_000_000 - at, share=Share(4000 + at, 0, 1))
        for at in range(count)
    ]
    made.change(0, 0, world=world, data=data)
    return made


@pytest.mark.parametrize("world", [1024, MAX_WORLD])
@pytest.mark.threat("A8")
def test_150_overlapping_ranges_of_one_worker(world: int, tmp_path: Path) -> None:
    """This once took 4.2 GB for a world of 1,024 and failed with MemoryError for 4,096."""
    result, most = audited(overlapping(world, 150), tmp_path / "run")
    assert most < 60_000_000
    assert [one.parties for one in of(result, Fault.DATA)] == [
        ("rank 0",),
        (f"ranks 1 to {world - 1}",),
    ]


@pytest.mark.threat("A8")
def test_a_certificate_without_a_world_does_not_say_how_large_it_is(tmp_path: Path) -> None:
    """The other ranks' certificates tell the world's size."""
    made = MadeRun(world=4, count=1)
    made.workers[3] = made.authority.worker(3, None)
    made.change(3, 0, world=MAX_WORLD)
    result, _ = audited(made, tmp_path / "run")
    assert of(result, Fault.GAP) == []
    assert [one.parties for one in of(result, Fault.DISAGREEMENT)] == [("rank 3",)]


def test_a_gap_is_not_blamed_on_ranks_that_read_the_same_share(tmp_path: Path) -> None:
    """Ranks 0 and 1 hold parts of one model and read the same samples; ranks 2 and 3 do too."""
    made = MadeRun(world=6, count=1)
    for rank in range(4):
        one = made.turns[rank, 0].data[0]
        made.change(rank, 0, data=[replace(one, share=Share(12, rank // 2 * 4, 4))])
    for rank in (4, 5):
        made.change(rank, 0, data=[])
    result, _ = audited(made, tmp_path / "run")
    assert [one.parties for one in of(result, Fault.DATA)] == [("ranks 4 to 5",)]


def test_absent_ranks_are_named_as_ranges(tmp_path: Path) -> None:
    assert absent_ranks([0, 1, 3, 7], 10) == ("rank 2", "ranks 4 to 6", "ranks 8 to 9")
    assert absent_ranks([], MAX_WORLD) == (f"ranks 0 to {MAX_WORLD - 1}",)
    assert absent_ranks([0, 12], 1) == ()
    made = MadeRun(world=1, count=1)
    made.workers[0] = made.authority.worker(0, None)
    made.change(0, 0, world=MAX_WORLD)
    result, _ = audited(made, tmp_path / "run")
    assert [one.parties for one in of(result, Fault.GAP)] == [(f"ranks 1 to {MAX_WORLD - 1}",)]


@pytest.mark.threat("A8")
def test_many_intervals_of_a_world_of_the_largest_size(tmp_path: Path) -> None:
    """Each statement once took a set of all ranks, to ask whether its group has all of them."""
    made = MadeRun(world=1, count=60)
    made.workers[0] = made.authority.worker(0, None)
    made.each(0, lambda one: replace(one, world=MAX_WORLD))
    claims = RunClaims(aggregation=Aggregation(frozenset({"all_reduce"}), False))
    result, most = audited(made, tmp_path / "run", AuditQuestion(claims))
    assert "names no collective of all ranks" in result.answers[0].text
    assert most < 3_000_000  # one set of all ranks has 4 MB


def work(function: Callable[[], object]) -> int:
    """Counts the Python opcodes that a call runs, which unlike seconds never varies."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def chain_of(intervals: Iterable[Interval]) -> Records:
    """Returns the records of one rank, in the form that `read_records` returns."""
    worker = Worker("job", 0, sha("certificate"), None)
    turns = [RankInterval(sha(f"{n}"), worker, one) for n, one in enumerate(intervals)]
    return Records(
        turns, keys={worker.certificate: "key"}, worlds={worker.certificate: 1}, chains={0: turns}
    )


@pytest.mark.threat("A8")
def test_two_numbers_of_a_chain_signed_many_times_are_not_compared_in_pairs() -> None:
    first, second = MadeRun(world=1, count=2).turns.values()

    def signed(many: int) -> Records:
        return chain_of([first] * many + [second] * many)

    found = check_chains(signed(100))
    assert [one.fault for one in found[:2]] == [Fault.TWO_STATEMENTS] * 2
    assert [one.fault for one in found[2:]] == [Fault.BROKEN_CHAIN] * 100
    assert max(len(one.against) for one in found) == MAX_AGAINST
    assert work(lambda: check_chains(signed(200))) < 3 * work(lambda: check_chains(signed(100)))


@pytest.mark.threat("A8")
def test_a_chain_that_goes_back_in_each_statement_is_gone_through_once() -> None:
    """Each statement reads a checkpoint of the step with which it begins."""

    def going_back(many: int) -> Records:
        return chain_of(
            replace(one, checkpoints_in=[checkpoint(one.first_step)])
            for one in MadeRun(world=1, count=many).turns.values()
        )

    records, twice = going_back(300), going_back(600)
    assert check_data(records) == []
    assert work(lambda: check_data(twice)) < 3 * work(lambda: check_data(records))


@pytest.mark.threat("A8")
def test_ranges_with_gaps_between_them_are_not_all_named_for_each_gap() -> None:
    one = MadeRun(world=1, count=1).turns[0, 0]

    def with_gaps(many: int) -> Records:
        ranges = [
            replace(one.data[0], first=10 * n, end=10 * n + 2, share=Share(2, 0, 2))
            for n in range(many)
        ]
        return chain_of([replace(one, data=ranges)])

    records, twice = with_gaps(100), with_gaps(200)
    (finding,) = check_data(records)
    assert "samples 2 to 10 of corpus were read by no rank" in finding.text
    assert work(lambda: check_data(twice)) < 3 * work(lambda: check_data(records))


def test_links_that_change_in_each_statement_are_not_copied_each_time(tmp_path: Path) -> None:
    made = MadeRun(world=1, count=40)
    made.workers[0] = made.authority.worker(0, None)
    each = 150
    group = GroupEpoch("0", "e1", [0], "open")
    said = Commitment(1, sha("x"))
    for sequence in range(40):
        links = [
            LinkAccount("0", "e1", 1 + sequence * each + peer, "message", said, said)
            for peer in range(each)
        ]
        made.change(0, sequence, world=MAX_WORLD, groups=[group], links=links)
    result, _ = audited(made, tmp_path / "run")
    # There is one finding for each statement but the first: a link of the one before is missing.
    assert len([one for one in of(result, Fault.LINK) if "leaves out" in one.text]) == 39


def test_many_stages_that_say_they_made_one_file(tmp_path: Path) -> None:
    made = MadeRun(world=1, count=1)
    out = [Named(f"o{number}", sha(f"o{number}")) for number in range(30)]
    made.made += [
        stage(f"s{number}", "stage", [Named("i", sha(f"i{number}"))], out, CLEANER)
        for number in range(30)
    ]
    result, most = audited(made, tmp_path / "run")
    assert len(of(result, Fault.TRANSFORMATION)) == 29 * 30
    faulty = [node for node in result.graph.nodes.values() if node.faulty]
    assert len([node for node in faulty if node.kind is NodeKind.STAGE]) == 29
    assert most < 20_000_000


def test_unnamed_checkpoints_of_later_steps_are_not_gone_through_each_time() -> None:
    made = MadeRun(world=1, count=1)
    late = [CheckpointRef(f"l{n}", 10**9 - n % 2, sha(f"l{n}"), None) for n in range(20_000)]
    early = [CheckpointRef(f"e{n}", n + 1, sha(f"e{n}"), sha(f"c{n}")) for n in range(20_000)]
    chain = [replace(made.turns[0, 0], checkpoints_out=late + early)]
    assert len(unrepeatable(chain)) == len(late)


@pytest.mark.threat("A8")
def test_very_many_findings_are_shown_in_part(tmp_path: Path) -> None:
    made = MadeRun(world=1, count=1)
    run = made.write(tmp_path / "run")
    for number in range(600):
        run.statement_path(f"x{number}").write_bytes(b'{"n":%d}' % number)
    result = audit(run.path, made.trust)
    assert len(result.findings) == 2 * 600
    html = page(result)
    assert html.count("<li><b>") == 1000
    assert "And 200 more" in html


@pytest.mark.threat("A8")
def test_a_long_name_is_not_repeated_whole_in_each_finding(tmp_path: Path) -> None:
    made = MadeRun(world=1, count=1)
    long = "n" * 20_000
    out = [Named(f"o{number}", sha(f"o{number}")) for number in range(100)]
    made.made += [stage(long, "stage", [], out, CLEANER), stage("b", "stage", [RAW], out, CLEANER)]
    result, _ = audited(made, tmp_path / "run")
    found = of(result, Fault.TRANSFORMATION)
    assert len(found) == 100
    assert max(len(one.text) for one in found) == MAX_TEXT + 1
