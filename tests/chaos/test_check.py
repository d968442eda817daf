"""The checker must find errors: from a right history the tests make one that breaks each rule."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from typing import Literal

import pytest

from tests.chaos.check import SLACK_S, Verdict, check
from tests.chaos.history import History, Outcome, SeenError
from tests.chaos.local import run_local
from tests.chaos.plan import Fault, FaultKind, Plan, make_plan
from tests.chaos.report import command, page

FLIP = Fault(FaultKind.FLIP, 0, sender=0, receiver=1)


@pytest.fixture
def plan() -> Plan:
    """A plan of three ranks over TCP without a fault."""
    for number in range(10_000):
        made = make_plan("local", 1, number)
        if not made.faults and made.world == 3 and made.transport == "tcp":
            return made
    raise AssertionError


@pytest.fixture
def history(plan: Plan) -> History:
    return run_local(plan)


def rules(verdict: Verdict) -> set[str]:
    return {violation.rule for violation in verdict.violations}


def last_of(history: History, rank: int) -> Outcome:
    return [outcome for outcome in history.outcomes if outcome.rank == rank][-1]


def fail(history: History, rank: int, name: str, peer: int, by: int | None = None) -> None:
    outcome = last_of(history, rank)
    outcome.output = None
    outcome.error = SeenError(name, "text", True, peer, outcome.call.number, by)


def struck(history: History, *, must_end: bool = True) -> None:
    history.hit(FLIP, "flipped", must_end=must_end, at=history.outcomes[0].started)


def all_fail(history: History) -> None:
    """Makes the errors after a flip from 0 to 1: rank 1 sees it, and tells the others."""
    struck(history)
    fail(history, 1, "TamperedRecord", 0)
    fail(history, 0, "TamperedRecord", 0, by=1)
    fail(history, 2, "TamperedRecord", 0, by=1)


def test_nothing_is_wrong_without_a_fault(plan: Plan, history: History) -> None:
    assert check(plan, history).violations == []


def test_one_cause_that_all_name_is_right(plan: Plan, history: History) -> None:
    all_fail(history)
    assert check(plan, history).violations == []


def test_one_who_lost_the_witness_is_right(plan: Plan, history: History) -> None:
    all_fail(history)
    fail(history, 2, "PeerLost", 1)
    assert check(plan, history).violations == []


def test_a_wrong_bit(plan: Plan, history: History) -> None:
    outcome = next(o for o in history.outcomes if o.output)
    assert outcome.output is not None
    outcome.output = bytes([outcome.output[0] ^ 1]) + outcome.output[1:]
    verdict = check(plan, history)
    assert rules(verdict) == {"the reference's result, bit by bit"}
    assert verdict.violations[0].rank == outcome.rank


def test_other_inputs_than_planned(plan: Plan, history: History) -> None:
    history.outcomes[0].inputs = "0" * 64
    assert rules(check(plan, history)) == {"inputs as planned"}


def test_errors_without_a_fault(plan: Plan, history: History) -> None:
    all_fail(history)
    history.hits.clear()
    assert rules(check(plan, history)) == {"every error has its cause"}


def test_two_who_only_blame_each_other(plan: Plan, history: History) -> None:
    all_fail(history)
    history.hits.clear()
    fail(history, 0, "PeerLost", 1)
    fail(history, 1, "PeerLost", 0)
    fail(history, 2, "PeerLost", 0)
    assert len(check(plan, history).violations) == 3


def test_another_error_than_the_witness_has(plan: Plan, history: History) -> None:
    all_fail(history)
    fail(history, 2, "ReplayedRecord", 0, by=1)
    assert rules(check(plan, history)) == {"every error has its cause"}


@pytest.mark.parametrize("other", [{"collective": None}, {"peer": 2}, {"collective": 77}])
def test_a_witness_that_told_something_else(
    plan: Plan, history: History, other: dict[str, int | None]
) -> None:
    """The report must match, whether a link for collectives or for messages carried it."""
    all_fail(history)
    heard = last_of(history, 2)
    assert heard.error is not None
    heard.error = replace(heard.error, **other)  # type: ignore[arg-type]
    assert rules(check(plan, history)) == {"every error has its cause"}


def test_a_sighting_about_the_wrong_rank(plan: Plan, history: History) -> None:
    all_fail(history)
    for rank, by in ((1, None), (0, 1), (2, 1)):
        fail(history, rank, "TamperedRecord", 2, by=by)
    assert rules(check(plan, history)) == {"every error has its cause"}


def test_one_goes_on(plan: Plan, history: History) -> None:
    before = replace(last_of(history, 2))
    all_fail(history)
    spared = last_of(history, 2)
    spared.error, spared.output = before.error, before.output
    assert rules(check(plan, history)) == {"all ranks fail, or none"}


def test_no_rank_notices(plan: Plan, history: History) -> None:
    struck(history)
    assert len(check(plan, history).violations) == 3
    assert rules(check(plan, history)) == {"all ranks fail, or none"}


def test_a_failed_group_comes_back(plan: Plan, history: History) -> None:
    all_fail(history)
    last = last_of(history, 0)
    assert last.ended is not None
    again = replace(last, error=None, output=b"", started=last.ended, ended=last.ended + 1)
    history.outcomes.append(again)
    assert "a failed group stays failed" in rules(check(plan, history))


def test_what_was_under_way_when_the_group_failed_may_come_out_right(
    plan: Plan, history: History
) -> None:
    before = last_of(history, 0)
    all_fail(history)
    under_way = replace(before, error=None, output=b"")
    history.outcomes.append(under_way)
    assert check(plan, history).violations == []
    under_way.error = SeenError("PeerLost", "text", True, 1, 0, None)
    assert rules(check(plan, history)) == {"a failed group stays failed"}


def test_an_error_that_is_not_sealrings(plan: Plan, history: History) -> None:
    all_fail(history)
    last_of(history, 2).error = SeenError("ValueError", "text", False, None, None, None)
    assert "errors are sealring's" in rules(check(plan, history))


def test_an_error_that_comes_late(plan: Plan, history: History) -> None:
    all_fail(history)
    last = last_of(history, 1)
    last.ended = last.started + plan.timeout_s + 1000
    assert rules(check(plan, history)) == {"errors come in time"}


def test_a_call_that_never_ends(plan: Plan, history: History) -> None:
    last = last_of(history, 1)
    last.ended = last.output = None
    assert rules(check(plan, history)) == {"every call ends"}


@pytest.mark.parametrize(("stall_s", "inconclusive"), [(0.0, False), (50.0, True)])
def test_silence_while_the_machine_stood_still_proves_nothing(
    plan: Plan, history: History, stall_s: float, inconclusive: bool
) -> None:
    for rank, peer, by in ((1, 0, None), (0, 0, 1), (2, 0, 1)):
        fail(history, rank, "PeerSilent", peer, by)
    history.longest_stall_s = stall_s
    verdict = check(plan, history)
    assert verdict.inconclusive is inconclusive
    assert bool(verdict.violations) is not inconclusive


def test_a_machine_that_stood_still_for_long_is_asked_for_results_only(
    plan: Plan, history: History
) -> None:
    history.trouble.append("a rank still hung")
    history.longest_stall_s = SLACK_S + 1
    verdict = check(plan, history)
    assert (verdict.violations, verdict.inconclusive) == ([], True)
    outcome = next(o for o in history.outcomes if o.output)
    assert outcome.output is not None
    outcome.output = bytes([outcome.output[0] ^ 1]) + outcome.output[1:]
    assert rules(check(plan, history)) == {"the reference's result, bit by bit"}


@pytest.mark.parametrize(
    ("transport", "rule"), [("shm", set()), ("tcp", {"all ranks fail, or none"})]
)
def test_a_cut_bell_may_be_seen_in_the_last_probe_of_all(
    plan: Plan, history: History, transport: Literal["shm", "tcp"], rule: set[str]
) -> None:
    cut = Fault(FaultKind.CUT, 0, sender=0, receiver=1)
    history.hit(cut, "both ways cut", must_end=False, at=history.outcomes[0].started)
    fail(history, 1, "PeerLost", 0)
    assert rules(check(replace(plan, transport=transport), history)) == rule


def test_the_page_says_what_was_expected_and_how_to_repeat_it(plan: Plan, history: History) -> None:
    outcome = next(o for o in history.outcomes if o.output)
    assert outcome.output is not None
    outcome.output = bytes([outcome.output[0] ^ 1]) + outcome.output[1:]
    history.hit(FLIP, "flipped <b>", must_end=False)
    text = page(plan, history, check(plan, history).violations)
    HTMLParser().feed(text)
    assert command(plan) in text
    assert "expected" in text
    assert "flipped &lt;b&gt;" in text
    assert "http" not in text, "the page opens offline"
