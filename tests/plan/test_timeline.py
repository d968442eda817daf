"""Computing beside communicating: what is hidden, what is not, and who shares a core."""

from __future__ import annotations

import pytest

from sealring.plan.timeline import Compute, Exchange, Sharing, run_step

COMPUTE = Compute(1.0, 2.0, 0.5)
ROOMY = Sharing(cores=8, ranks=2)


def test_without_exchanges_a_step_is_its_computing() -> None:
    step = run_step(COMPUTE, [], ROOMY)
    assert (step.seconds, step.communicating_s) == (3.5, 0.0)


def test_what_is_ready_early_is_hidden() -> None:
    step = run_step(COMPUTE, [Exchange(0.5, 0.8, 0.8)], ROOMY)
    assert step.seconds == pytest.approx(3.5)
    assert step.exposed_s == 0.0
    assert step.hidden_s == pytest.approx(0.8)


def test_the_last_bucket_is_always_exposed() -> None:
    step = run_step(COMPUTE, [Exchange(1.0, 0.8, 0.8)], ROOMY)
    assert step.seconds == pytest.approx(4.3)
    assert step.exposed_s == pytest.approx(0.8)


def test_exchanges_wait_for_each_other() -> None:
    step = run_step(COMPUTE, [Exchange(0.5, 1.5, 0.0), Exchange(0.6, 1.0, 0.0)], ROOMY)
    assert step.seconds == pytest.approx(1.0 + 1.0 + 2.5 + 0.5)
    assert step.exposed_s == pytest.approx(1.5)


def test_without_overlap_everything_is_exposed() -> None:
    step = run_step(COMPUTE, [Exchange(0.1, 0.8, 0.8)], ROOMY, overlaps=False)
    assert step.seconds == pytest.approx(4.3)
    assert step.hidden_s == pytest.approx(0.0)


def test_an_engine_that_shares_the_core_hides_nothing() -> None:
    """One core: whatever the engine does, backward does not."""
    step = run_step(COMPUTE, [Exchange(0.5, 0.5, 0.5)], Sharing(cores=1, ranks=1))
    assert step.seconds == pytest.approx(4.0)
    assert step.slowed_s == pytest.approx(0.5)


def test_waiting_for_a_link_costs_no_core() -> None:
    step = run_step(COMPUTE, [Exchange(0.5, 0.5, 0.0)], Sharing(cores=1, ranks=1))
    assert step.seconds == pytest.approx(3.5)


@pytest.mark.parametrize(("ranks", "part"), [(2, 1.0), (4, 1.0), (4, 0.8), (4, 0.3), (3, 0.9)])
def test_work_is_neither_lost_nor_gained(ranks: int, part: float) -> None:
    """A collective alone takes its own time, or what its work takes on all cores."""
    step = run_step(Compute(0.0, 0.0, 0.0), [Exchange(1.0, 1.0, part)], Sharing(2.0, ranks))
    assert step.seconds == pytest.approx(max(1.0, ranks * part / 2.0), rel=1e-6)
