"""`python -m sealring.lab collectives`: its output, and how floor and bar are computed."""

from __future__ import annotations

import json
import os

import pytest
from typer.testing import CliRunner

from sealring.errors import ConfigurationError
from sealring.lab.__main__ import app
from sealring.lab.bench.collectives import COLLECTIVES, bar, plan_of
from sealring.lab.bench.harness import aes_rate, busiest_core

SIZE = 4096
MIB = 1 << 20


@pytest.mark.timeout(300)  # wall time, on a machine that may be busy
def test_bench_collectives_prints_every_collective_and_its_floor() -> None:
    arguments = ["collectives", "--ranks", "2", "--sizes", str(SIZE), "--blocks", "3", "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    cases = {case["collective"]: case for case in json.loads(done.stdout)["cases"]}
    assert list(cases) == list(COLLECTIVES)
    for name, case in cases.items():
        assert (case["ranks"], case["transport"]) == (2, "shm")
        assert case["bytes"] == (0 if name == "barrier" else SIZE)
        if case["ratio"] is None:
            assert case["noise"] > 0.05
        else:
            assert case["ratio"] == pytest.approx(case["sealed_us"] / case["gloo_us"], rel=1e-2)
        assert case["bar_us"] == case["gloo_us"]
        assert case["floor_us"] == pytest.approx(
            case["busiest_core_bytes"] / case["aes_bytes_per_s"] * 1e6, abs=0.01
        )
    a_ranks_bytes = {
        # A small tensor: each rank publishes its tensor and opens the other's.
        "all_reduce": 2 * SIZE,
        "reduce_scatter": SIZE,
        "all_gather": SIZE,
        "broadcast": SIZE,
        "reduce": SIZE,
        "gather": SIZE // 2,  # the other half is rank 0's own
        "scatter": SIZE // 2,
        "all_to_all": SIZE,
        "send_recv": 2 * SIZE,
        "barrier": 0,
    }
    ranks_a_core = 2 if len(os.sched_getaffinity(0)) == 1 else 1
    assert {name: case["busiest_core_bytes"] for name, case in cases.items()} == {
        name: ranks_a_core * count for name, count in a_ranks_bytes.items()
    }


def test_only_some_over_tcp() -> None:
    arguments = [
        "collectives", "--ranks", "2", "--sizes", "8KiB,16KiB", "--only", "send_recv,barrier",
        "--blocks", "3", "--json",
    ]  # fmt: skip
    done = CliRunner().invoke(app, arguments, env={"SEALRING_TRANSPORT": "tcp"})
    assert done.exit_code == 0, done.output
    cases = json.loads(done.stdout)["cases"]
    assert [(case["collective"], case["bytes"], case["transport"]) for case in cases] == [
        ("send_recv", 8192, "tcp"),
        ("send_recv", 16384, "tcp"),
        ("barrier", 0, "tcp"),
    ]
    assert [case["meets_bar"] is None for case in cases] == [True, True, False]


@pytest.mark.parametrize(
    ("rank_bytes", "cores", "busiest"),
    [
        ([10, 10], 2, 10),
        ([10, 10], 1, 20),
        ([30, 10, 10, 10], 2, 30),  # shared evenly
        ([50, 10, 10, 10], 2, 50),  # rank 0 alone has more than an even share
        ([5, 5, 5], 2, 8),
        ([10, 4], 64, 10),
    ],
)
def test_the_busiest_core_has_its_share_and_at_least_one_rank(
    rank_bytes: list[int], cores: int, busiest: int
) -> None:
    assert busiest_core(rank_bytes, cores) == busiest


@pytest.mark.parametrize(
    ("size", "transport", "gloo", "floor", "expected"),
    [
        (4096, "shm", 100.0, 90.0, 100.0),
        (4096, "tcp", 100.0, 90.0, 100.0),
        (4096, "shm", None, 90.0, None),
        (25 * MIB, "shm", 100.0, 10.0, 150.0),
        (25 * MIB, "shm", 100.0, 200.0, 280.0),
        (25 * MIB, "shm", None, 200.0, 280.0),
        (25 * MIB, "tcp", 100.0, 10.0, None),
        (MIB, "shm", 100.0, 10.0, None),
    ],
)
def test_the_bar(
    size: int, transport: str, gloo: float | None, floor: float, expected: float | None
) -> None:
    assert bar(size, transport, gloo, floor) == expected


def test_aes_has_a_rate() -> None:
    assert 1e7 < aes_rate(runs=20) < 1e12


def test_a_barrier_has_no_size() -> None:
    plan = plan_of(["barrier", "reduce"], 2, [8, 16])
    assert plan == [("barrier", 0), ("reduce", 8), ("reduce", 16)]


def test_an_unknown_collective_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="'all_sum' is not a collective; there is all_r"):
        plan_of(["all_sum"], 2, [SIZE])


def test_a_size_that_does_not_split_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="among 3 ranks; take a multiple of 12"):
        plan_of(["gather"], 3, [SIZE])
