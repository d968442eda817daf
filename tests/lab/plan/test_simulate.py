"""The simulated clock runs the engines' own programs; extrapolated times match simulated ones."""

from __future__ import annotations

import dataclasses

import pytest

from sealring._native import STRIPE_SEGMENTS
from sealring.core.engine.lanes import LANED_BYTES, MAX_LANED_WORLD
from sealring.core.schedule import Algorithm, Operation, Topology, program_for
from sealring.errors import ConfigurationError
from sealring.lab.plan.collectives import (
    Cluster,
    Costs,
    Cutting,
    Hop,
    Simulated,
    collective,
    longest_slot,
    simulate,
)
from tests.codes import coded

ALL_REDUCE = Operation.ALL_REDUCE
FREE = Hop(0.0, 0.0)
GPU = Costs(
    1 / 756e9, 1 / 574e9, 1 / 900e9, 1 / 1500e9,
    inside=Hop(5e-6, 1 / 450e9, 1e-6, 1e-6),
    between=Hop(20e-6, 1 / 50e9, 1e-6, 1e-6, 1e-12, 2e-12, 3e-12),
)  # fmt: skip
CPU = Costs(
    1 / 2e9, 1 / 2e9, 1 / 8e9, 1 / 8e9,
    inside=Hop(2e-6, 0.0, 3e-6, 3e-6, 0.0, 1 / 8e9, 1 / 8e9),
    between=Hop(2e-5, 1 / 1e9, 3e-6, 3e-6, 1 / 4e9, 1 / 4e9, 1 / 4e9),
)  # fmt: skip
CROWD = dataclasses.replace(CPU, turn_s=3e-5)
RECORDS = Cutting(124 << 10, by_world=True)
FOUR_THREADS = Cutting(124 << 10, by_world=True, threads=4)


def whole(
    algorithm: Algorithm, cluster: Cluster, nbytes: int, costs: Costs, cutting: Cutting = RECORDS
) -> Simulated:
    """Simulates every rank and every segment."""
    slot = longest_slot(ALL_REDUCE, algorithm, cluster, nbytes)
    hosts = cluster.host_of()
    topology = Topology(hosts) if algorithm is Algorithm.HIERARCHICAL else None
    programs = [
        program_for(ALL_REDUCE, algorithm, cluster.ranks, rank, topology=topology)
        for rank in range(cluster.ranks)
    ]
    return simulate(programs, slot, cutting.segments(slot, cluster.ranks), costs, hosts)


@pytest.mark.parametrize("costs", [GPU, CPU, CROWD], ids=["gpu", "cpu", "crowd"])
@pytest.mark.parametrize(
    ("ranks", "per_host", "nbytes"),
    [
        (2, 2, 25 << 20),
        (3, 3, 25 << 20),
        (4, 4, 4096),
        (4, 4, 100 << 20),
        (8, 2, 25 << 20),
        (12, 1, 25 << 20),
        (24, 4, 25 << 20),
        (40, 40, 9_999_999),
        (40, 1, 25 << 20),
        (48, 8, 4 << 20),
    ],
)
def test_a_ring_of_any_size_takes_what_all_its_ranks_take(
    ranks: int, per_host: int, nbytes: int, costs: Costs
) -> None:
    cluster = Cluster(ranks, per_host)
    found = collective(ALL_REDUCE, Algorithm.RING, cluster, nbytes, costs, RECORDS)
    expected = whole(Algorithm.RING, cluster, nbytes, costs)
    within = 0.03 if costs is CROWD else 0.005
    assert found.seconds == pytest.approx(expected.seconds, rel=within)
    assert found.engine_s == pytest.approx(expected.engine_s, rel=within)
    assert found.out_bytes == pytest.approx(expected.out_bytes, rel=0.005)


@pytest.mark.parametrize("costs", [GPU, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize(
    ("algorithm", "within"),
    [
        (Algorithm.DIRECT, 0.08),
        (Algorithm.TREE, 0.10),
        (Algorithm.PARAMETER_SERVER, 0.16),
        (Algorithm.HIERARCHICAL, 0.16),
    ],
)
@pytest.mark.parametrize(("ranks", "per_host"), [(4, 4), (12, 4), (24, 4), (40, 1)])
def test_other_algorithms_are_near_what_all_their_ranks_take(
    algorithm: Algorithm, within: float, ranks: int, per_host: int, costs: Costs
) -> None:
    cluster = Cluster(ranks, per_host)
    found = collective(ALL_REDUCE, algorithm, cluster, 1 << 20, costs, RECORDS)
    expected = whole(algorithm, cluster, 1 << 20, costs)
    assert found.seconds == pytest.approx(expected.seconds, rel=within)


@pytest.mark.parametrize("costs", [GPU, CPU], ids=["gpu", "cpu"])
def test_hosts_of_many_ranks_follow_from_hosts_of_few(costs: Costs) -> None:
    cluster = Cluster(60, 20)
    found = collective(ALL_REDUCE, Algorithm.RING, cluster, 4 << 20, costs, RECORDS)
    expected = whole(Algorithm.RING, cluster, 4 << 20, costs)
    assert found.seconds == pytest.approx(expected.seconds, rel=0.03)


def test_a_host_that_is_not_full_counts_as_full() -> None:
    """Even in the largest worlds of odd size, not every rank needs to be simulated."""
    odd, full = (
        collective(ALL_REDUCE, Algorithm.RING, Cluster(ranks, 8), 1 << 30, GPU, RECORDS)
        for ranks in (16_001, 16_008)
    )
    assert odd.seconds == pytest.approx(full.seconds, rel=0.01)


def test_one_rank_needs_no_peer() -> None:
    alone = collective(ALL_REDUCE, Algorithm.RING, Cluster(1, 1), 1 << 20, CPU, RECORDS)
    assert (alone.seconds, alone.out_bytes) == (0.0, 0.0)


def test_a_ring_over_slow_links_takes_two_thirds_more_of_them_with_each_rank() -> None:
    """2 (n - 1) / n of the tensor leaves every rank: the classic bound for a ring."""
    costs = Costs(0.0, 0.0, 0.0, 0.0, inside=Hop(0.0, 1e-9), between=FREE)
    for ranks in (2, 3, 4, 8):
        nbytes = 64 * 124 * 1024 * ranks
        found = collective(
            ALL_REDUCE, Algorithm.RING, Cluster(ranks, ranks), nbytes, costs, RECORDS
        )
        least = 2 * (ranks - 1) / ranks * nbytes * 1e-9
        assert found.out_bytes == pytest.approx(2 * (ranks - 1) / ranks * nbytes)
        assert least <= found.seconds < 1.25 * least


def test_a_ring_without_bytes_takes_its_latencies() -> None:
    costs = Costs(0.0, 0.0, 0.0, 0.0, inside=Hop(1e-3, 0.0), between=FREE)
    for ranks in (2, 5, 9):
        found = collective(ALL_REDUCE, Algorithm.RING, Cluster(ranks, ranks), 64, costs, RECORDS)
        assert found.seconds == pytest.approx(2 * (ranks - 1) * 1e-3)


def test_an_engine_waits_for_its_turn_only_when_it_has_run_out_of_records() -> None:
    """A single record needs a turn at every hop of the ring; many records keep an engine busy."""
    four = Cluster(4, 4)
    for nbytes, turns in ((4096, (6, 6)), (100 << 20, (0, 40))):
        base, crowded = (
            collective(ALL_REDUCE, Algorithm.RING, four, nbytes, costs, RECORDS)
            for costs in (CPU, CROWD)
        )
        fewest, most = turns
        taken = (crowded.engine_s - base.engine_s) / CROWD.turn_s
        assert fewest - 0.01 <= taken <= most + 0.01


def test_what_is_passed_on_is_not_sealed_again() -> None:
    """Only sealing costs time: each rank seals n chunks, n - 1 of them before the sum."""
    costs = Costs(1.0, 0.0, 0.0, 0.0, inside=FREE, between=FREE)
    found = collective(ALL_REDUCE, Algorithm.RING, Cluster(4, 4), 4096, costs, RECORDS)
    assert found.engine_s == pytest.approx(4096)


def test_slower_links_between_hosts_are_used_once_by_hierarchical_programs() -> None:
    slow = Costs(0.0, 0.0, 0.0, 0.0, inside=Hop(0.0, 1e-12), between=Hop(0.0, 1e-9))
    cluster = Cluster(8, 4)
    ring = collective(ALL_REDUCE, Algorithm.RING, cluster, 8 << 20, slow, RECORDS)
    spread = collective(ALL_REDUCE, Algorithm.HIERARCHICAL, cluster, 8 << 20, slow, RECORDS)
    assert spread.seconds < ring.seconds / 2


def test_ranks_that_do_not_divide_the_world_cannot_stand_for_it() -> None:
    programs = [program_for(ALL_REDUCE, Algorithm.RING, 5, rank) for rank in range(2)]
    with pytest.raises(
        ConfigurationError,
        match="2 ranks do not stand for a world of 5",
        check=coded("configuration.schedule_error"),
    ):
        simulate(programs, 1024.0, 1, CPU, [0] * 5)


def test_programs_that_wait_for_each_other_are_noticed() -> None:
    programs = [program_for(ALL_REDUCE, Algorithm.RING, 2, rank) for rank in range(2)]
    # Without its first step, no rank sends anything.
    broken = [dataclasses.replace(each, steps=each.steps[1:2]) for each in programs]
    broken = [
        dataclasses.replace(
            each, steps=tuple(dataclasses.replace(step, after=()) for step in each.steps)
        )
        for each in broken
    ]
    with pytest.raises(
        ConfigurationError,
        match="wait for each other in a circle",
        check=coded("configuration.schedule_error"),
    ):
        simulate(broken, 1024.0, 1, CPU, [0, 0])


@pytest.mark.parametrize("algorithm", [Algorithm.RING, Algorithm.PARAMETER_SERVER])
def test_threads_share_a_large_tensor(algorithm: Algorithm) -> None:
    def takes(ranks: int, nbytes: int, cutting: Cutting) -> float:
        cluster = Cluster(ranks, ranks)
        return collective(ALL_REDUCE, algorithm, cluster, nbytes, CPU, cutting).seconds

    large, small = 256 << 20, 2 * LANED_BYTES - 128
    assert takes(2, large, FOUR_THREADS) == pytest.approx(takes(2, large, RECORDS) / 4, rel=0.02)
    for ranks, nbytes in ((2, small), (MAX_LANED_WORLD + 1, large)):
        assert takes(ranks, nbytes, FOUR_THREADS) == takes(ranks, nbytes, RECORDS)
    # In a group that is too large to link all pairs, the links of the program have lanes.
    assert takes(16, large, FOUR_THREADS) < 0.4 * takes(16, large, RECORDS)
    # There is one stripe too many for four threads, so one thread has two stripes.
    stripes = 5 * STRIPE_SEGMENTS * (124 << 10)
    assert takes(2, 2 * stripes, FOUR_THREADS) > 0.3 * takes(2, 2 * stripes, RECORDS)
