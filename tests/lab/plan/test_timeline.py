"""Computing and communicating at once: what is hidden or exposed, and who shares a core."""

from __future__ import annotations

import pytest

from sealring.lab.plan.layouts import Compute, Sharing, StepCollective, run_step

COMPUTE = Compute(1.0, 2.0, 0.5)
ROOMY = Sharing(cores=8, ranks=2)


def test_without_exchanges_a_step_is_its_computing() -> None:
    step = run_step(COMPUTE, [], ROOMY)
    assert (step.seconds, step.communicating_s) == (3.5, 0.0)


def test_what_is_ready_early_is_hidden() -> None:
    step = run_step(COMPUTE, [StepCollective(0.5, 0.8, 0.8)], ROOMY)
    assert step.seconds == pytest.approx(3.5)
    assert step.exposed_s == 0.0
    assert step.hidden_s == pytest.approx(0.8)


def test_the_last_bucket_is_always_exposed() -> None:
    step = run_step(COMPUTE, [StepCollective(1.0, 0.8, 0.8)], ROOMY)
    assert step.seconds == pytest.approx(4.3)
    assert step.exposed_s == pytest.approx(0.8)


def test_exchanges_wait_for_each_other() -> None:
    step = run_step(COMPUTE, [StepCollective(0.5, 1.5, 0.0), StepCollective(0.6, 1.0, 0.0)], ROOMY)
    assert step.seconds == pytest.approx(1.0 + 1.0 + 2.5 + 0.5)
    assert step.exposed_s == pytest.approx(1.5)


def test_without_overlap_everything_is_exposed() -> None:
    step = run_step(COMPUTE, [StepCollective(0.1, 0.8, 0.8)], ROOMY, overlaps=False)
    assert step.seconds == pytest.approx(4.3)
    assert step.hidden_s == pytest.approx(0.0)


def test_an_engine_that_shares_the_core_hides_nothing() -> None:
    """On one core, backward stands still whenever the engine works."""
    step = run_step(COMPUTE, [StepCollective(0.5, 0.5, 0.5)], Sharing(cores=1, ranks=1))
    assert step.seconds == pytest.approx(4.0)
    assert step.slowed_s == pytest.approx(0.5)


def test_waiting_for_a_link_costs_no_core() -> None:
    step = run_step(COMPUTE, [StepCollective(0.5, 0.5, 0.0)], Sharing(cores=1, ranks=1))
    assert step.seconds == pytest.approx(3.5)


@pytest.mark.parametrize(("ranks", "part"), [(2, 1.0), (4, 1.0), (4, 0.8), (4, 0.3), (3, 0.9)])
def test_work_is_neither_lost_nor_gained(ranks: int, part: float) -> None:
    """A collective alone takes its own time, or the time that its work takes on all cores."""
    step = run_step(Compute(0.0, 0.0, 0.0), [StepCollective(1.0, 1.0, part)], Sharing(2.0, ranks))
    assert step.seconds == pytest.approx(max(1.0, ranks * part / 2.0), rel=1e-6)


def test_three_ranks_that_yield_take_as_long_on_two_cores_as_four() -> None:
    """Two of the three ranks share one core, and the third waits for them."""
    alone = [StepCollective(1.0, 1.0, 0.9)]
    three, four = (
        run_step(Compute(0.0, 0.0, 0.0), alone, Sharing(2.0, ranks, yields=True)).seconds
        for ranks in (3, 4)
    )
    assert three == four == pytest.approx(1.8, rel=1e-6)
    assert [Sharing(2.0, ranks).turns for ranks in (2, 3, 8)] == [0.0, 0.5, 3.0]
    assert [Sharing(2.0, ranks, yields=True).turns for ranks in (2, 3, 8)] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("ranks", "cores", "busiest"),
    [(2, 1, 2), (3, 2, 2), (4, 2, 3), (8, 2, 5), (5, 4, 2), (2, 2, 1), (4, 16, 1)],
)
def test_ranks_that_have_not_settled_may_share_one_core_of_several(
    ranks: int, cores: int, busiest: int
) -> None:
    """How many ranks share the busiest core.

    Four ranks can wake up on two cores in 16 ways. In 6 of them each core has two ranks, and in 14
    no core has more than three: the median is three. If there is a core for every rank, each rank
    finds one.
    """
    assert Sharing(cores, ranks, yields=True, settled=False).on_a_core == busiest
    assert Sharing(cores, ranks, yields=True).on_a_core == -(-ranks // cores)
    assert Sharing(cores, ranks, settled=False).on_a_core == max(1.0, ranks / cores)


def test_threads_that_share_an_exchange_need_a_core_each() -> None:
    shared = [StepCollective(0.5, 0.5, 0.5, threads=4)]
    alone = run_step(Compute(0.0, 0.0, 0.0), shared, ROOMY)
    assert alone.seconds == pytest.approx(0.5)
    assert run_step(COMPUTE, shared, Sharing(cores=10, ranks=2)).slowed_s == pytest.approx(0.0)
    # Four cores for four engines and for computing: all five run at four fifths of their speed.
    step = run_step(COMPUTE, shared, ROOMY)
    assert step.slowed_s == pytest.approx(0.5 / 0.8 * 0.2)
