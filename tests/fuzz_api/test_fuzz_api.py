"""Ten seconds of the fuzzer in every test run, and proof that it detects errors."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

from tests.fuzz_api import leaks
from tests.fuzz_api.operations import Call
from tests.fuzz_api.plan import ENDINGS, OPERATIONS, Step, plan
from tests.fuzz_api.run import fuzz
from tests.fuzz_api.tensors import make, same
from tests.fuzz_api.worker import Report, _Runner
from tests.fuzz_api.world import World, WorldEnded

SEED = 15


def a_step(operation: str = "broadcast", *, exact: bool = True) -> Step:
    return Step(operation, torch.float32, (3, 4), "transposed", "SUM", 0, exact, 1)


def test_one_seed_makes_one_plan_that_has_everything() -> None:
    cases = [plan(SEED, number, 3) for number in range(300)]
    assert cases == [plan(SEED, number, 3) for number in range(300)]
    steps = [step for case in cases for batch in case.batches for step in batch]
    assert {step.operation for step in steps} == set(OPERATIONS)
    assert {case.ending for case in cases} == set(ENDINGS)


def test_views_have_the_values_of_the_plain_tensors() -> None:
    for case in (plan(SEED, number, 3) for number in range(50)):
        for step in (step for batch in case.batches for step in batch):
            for written in (False, True):
                viewed = make(step, 1, 2, views=True, written=written)
                assert same(viewed, make(step, 1, 2, views=False, written=written), step)


@pytest.mark.parametrize("exact", [True, False])
def test_a_wrong_result_is_a_difference(exact: bool) -> None:
    step = a_step("all_reduce", exact=exact)
    report, case = Report(), plan(SEED, 0, 3)
    ours, theirs = (Call(None, (0, 1, 2), 0, step, views) for views in (True, False))
    for call in (ours, theirs):
        call.written()
    runner = _Runner(case, 0, report)
    runner.judge(step, ours, theirs)
    assert (report.findings, report.counts["equal"]) == ([], 1)
    ours.outputs[0][2, 3] += 0.01
    runner.judge(step, ours, theirs)
    assert [kind for kind, _ in report.findings] == ["difference"]


def test_equal_means_bit_for_bit_where_nothing_rounds() -> None:
    one = torch.ones(3)
    nearly = one + 1e-7
    assert not same(nearly, one, a_step())
    assert same(nearly, one, a_step("all_reduce", exact=False))
    assert not same(one.double(), one, a_step())
    assert same([1, "a"], [1, "a"], a_step())


def test_an_open_descriptor_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "_PATIENCE_S", 0.1)
    before = leaks.held()
    descriptor = os.memfd_create("sealring-left")
    try:
        assert "memfd:sealring-left" in leaks.left_behind(before)
    finally:
        os.close(descriptor)
    assert leaks.left_behind(before) == ""


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGSEGV, "crash"), (signal.SIGSTOP, "hang")])
def test_a_rank_that_dies_or_stands_still_is_found(number: int, kind: str) -> None:
    world = World(1, SEED, patience_s=60)
    try:
        world.patience_s = 5
        process: Any = world.processes[0]
        os.kill(process.pid, number)
        with pytest.raises(WorldEnded) as caught:
            world.run(0)
        assert caught.value.args[0] == kind
        if kind == "crash":
            assert f"ended with {-number}" in caught.value.args[1]
    finally:
        world.close()


def test_ten_seconds_find_nothing() -> None:
    result = fuzz(SEED, 2, 10.0, None, 100.0, lambda _: None)
    assert result.findings == [], [result.again(finding) for finding in result.findings]
    assert result.counts["equal"] > 0
