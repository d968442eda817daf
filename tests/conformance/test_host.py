"""A case that does not end well is a failed case, whatever way it does not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conformance.outcome import Outcome
from tests.conformance.run import ROOT


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.conformance.misbehaving"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = [Outcome.from_json(json.loads(line)) for line in done.stdout.splitlines()]
    return {outcome.case: outcome for outcome in found}


def test_a_case_passes_when_all_ranks_do(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["passes"].verdict == "passed"


def test_a_hang_is_a_failure(outcomes: dict[str, Outcome]) -> None:
    for case in ("hangs", "ignores_a_hang_of_all"):
        assert outcomes[case].verdict == "failed"
        assert "no end after 10 s" in outcomes[case].reason
        assert "rank 1 was still running and was ended" in outcomes[case].reason
        # It was asked where it is before it was ended.
        assert "misbehaving.py" in outcomes[case].output["1"]


def test_a_rank_that_dies_is_a_failure(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["dies"].verdict == "failed"
    assert "rank 1 died of SIGKILL" in outcomes["dies"].reason


def test_a_failure_says_what_was_raised(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["fails"].verdict == "failed"
    assert outcomes["fails"].reason.startswith("ValueError: one and one is three")


def test_a_skip_is_one_only_if_every_rank_skips(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["skips_on_all_ranks"].verdict == "skipped"
    assert outcomes["skips_on_one_rank"].verdict == "failed"
