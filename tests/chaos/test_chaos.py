"""About two minutes of chaos in every test run; `make chaos SECONDS=1800` runs for longer."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from tests.chaos.plan import FaultKind, Where, make_plan
from tests.chaos.run import Chaos, Counts

SEED = 20
LOCAL_S, LIGHT_S, PROCESSES_S = 45.0, 15.0, 55.0


def told(counts: Counts) -> str:
    return "\n".join([*counts.commands, *counts.pages, *counts.sentences])


def test_the_same_seed_makes_the_same_plans() -> None:
    for where in get_args(Where):
        plans = [make_plan(where, SEED, number) for number in range(50)]
        again = [make_plan(where, SEED, number) for number in range(50)]
        assert plans == again
        assert len(set(plans)) == 50


def test_plans_know_every_fault() -> None:
    planned = {
        fault.kind
        for where in get_args(Where)
        for number in range(400)
        for fault in make_plan(where, SEED, number).faults
    }
    assert planned == set(FaultKind)


@pytest.mark.timeout(1200)
@pytest.mark.threat("W14")
def test_engines_in_one_process(tmp_path: Path) -> None:
    chaos = Chaos(SEED, tmp_path)
    chaos.local(LOCAL_S)
    assert chaos.counts.violations == 0, told(chaos.counts)
    assert chaos.counts.faults
    assert chaos.counts.results


@pytest.mark.timeout(1200)
def test_light_workers_whose_links_are_made_in_the_traffic(tmp_path: Path) -> None:
    chaos = Chaos(SEED, tmp_path)
    chaos.light(LIGHT_S)
    assert chaos.counts.violations == 0, told(chaos.counts)
    assert chaos.counts.faults
    assert chaos.counts.results


@pytest.mark.timeout(1200)
@pytest.mark.threat("W14")
def test_worker_processes(tmp_path: Path) -> None:
    chaos = Chaos(SEED, tmp_path)
    chaos.processes(PROCESSES_S)
    assert chaos.counts.violations == 0, told(chaos.counts)
    assert chaos.counts.faults
    assert chaos.counts.results
