"""No failure hides among the skips, and no skip goes unseen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance import listed
from tests.conformance.listed import Judgement, Listed
from tests.conformance.outcome import Evidence, Outcome, Verdict
from tests.conformance.subset import SUBSET

LIST = Listed("2.13.0", skips={"gpu": "no GPU"}, cannot_apply={"odd": "asks for Gloo's own type"})
SEALED = Evidence(ranks=4, sealed_records=9, sealed_bytes=900)


def outcome(case: str, verdict: Verdict, reason: str = "", evidence: Evidence = SEALED) -> Outcome:
    return Outcome(case, 4, verdict, reason, evidence=evidence)


def judged(*ours: Outcome, gloo: tuple[Outcome, ...] = (), whole: str | None = None) -> Judgement:
    by_case = {outcome.case: outcome for outcome in ours}
    return listed.judge(by_case, {o.case: o for o in gloo}, LIST, whole_suite_of=whole)


def test_a_run_in_order() -> None:
    judgement = judged(
        outcome("add", "passed"),
        outcome("gpu", "skipped", "no GPU"),
        outcome("odd", "failed", "rank 0 failed"),
        gloo=(outcome("add", "passed"), outcome("gpu", "skipped"), outcome("odd", "passed")),
        whole="2.13.0",
    )
    assert judgement == Judgement(["add"], [], ["gpu", "odd"], [])


def test_what_passes_on_gloo_and_fails_here_fails_the_run() -> None:
    judgement = judged(outcome("add", "failed", "wrong sum"), gloo=(outcome("add", "passed"),))
    assert judgement.failed == ["add"]
    assert judgement.complaints == ["add failed (passed on Gloo): wrong sum"]


def test_what_fails_on_both_fails_the_run_all_the_same() -> None:
    judgement = judged(outcome("add", "failed", "wrong sum"), gloo=(outcome("add", "failed"),))
    assert judgement.complaints == ["add failed (failed on Gloo): wrong sum"]


@pytest.mark.parametrize(
    ("ours", "complaint"),
    [
        (outcome("add", "skipped", "why not"), "add skipped itself and is not listed: why not"),
        (
            outcome("gpu", "skipped", "why not"),
            "gpu skipped itself because 'why not', and is listed with 'no GPU'",
        ),
        (outcome("gpu", "passed"), "gpu passed, but is listed as one that skips itself"),
        (outcome("odd", "passed"), "odd passed, but is listed as one that cannot apply"),
        (outcome("odd", "skipped"), "odd skipped, but is listed as one that cannot apply"),
    ],
)
def test_a_difference_from_the_list_fails_the_run(ours: Outcome, complaint: str) -> None:
    assert judged(ours).complaints == [complaint]


def test_a_listed_skip_that_gloo_passes_fails_the_run() -> None:
    judgement = judged(outcome("gpu", "skipped", "no GPU"), gloo=(outcome("gpu", "passed"),))
    assert judgement.complaints == ["gpu skipped itself and passed on Gloo"]


def test_a_case_that_vanishes_fails_the_run() -> None:
    judgement = judged(gloo=(outcome("add", "passed"),), whole="2.13.0")
    assert judgement.complaints == [
        "only run on Gloo: add",
        "gpu is listed, and torch 2.13.0 has no such case",
        "odd is listed, and torch 2.13.0 has no such case",
    ]


def test_a_pass_counts_only_if_the_groups_were_sealed() -> None:
    plain = {"add": outcome("add", "passed", evidence=Evidence())}
    assert listed.unproven(plain) == [
        "add passed without a sealed default group on every rank",
        "no record was sealed in the whole run",
    ]
    assert listed.unproven({"add": outcome("add", "passed")}) == []


def test_the_file_can_be_read_and_has_no_case_of_ci_but_one_skip() -> None:
    real = listed.read()
    assert not real.cannot_apply
    assert SUBSET & real.skips.keys() == {"test_all_reduce_sum_cuda"}


def test_a_case_listed_twice_is_refused(tmp_path: Path) -> None:
    entry = '[[skips_itself]]\ntorch_says = "no"\ncases = ["a", "a"]\n'
    (tmp_path / "list.toml").write_text('torch = "2.13.0"\n' + entry)
    with pytest.raises(ValueError, match=r"list\.toml lists a twice"):
        listed.read(tmp_path / "list.toml")
