"""A process that makes groups without end keeps records of a bounded number, and all counts."""

from __future__ import annotations

import pytest

from sealring.observe import process
from sealring.observe.metrics import ENDED, KEPT_NAMES, EndedGroups
from sealring.observe.process import KEPT_CLOSED, counts_of_all_groups, keep, recorders
from tests.observe.test_flight import CountingEngine, recorder, run


@pytest.fixture(autouse=True)
def none_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_recorders", [])
    monkeypatch.setattr(process, "_ended", EndedGroups())


def group_that_ended(name: str) -> None:
    flight = recorder(CountingEngine())
    flight.group = name
    keep(flight)
    run(flight, 1)
    flight.close()


def collectives_by_group() -> dict[str, float]:
    return {
        series.group: value
        for series, value in counts_of_all_groups().items()
        if series.metric == "collectives"
    }


def test_groups_of_one_name_count_as_one() -> None:
    for _ in range(100):
        group_that_ended("pairs")
    assert len(recorders()) == KEPT_CLOSED + 1
    assert collectives_by_group() == {"pairs": 100}


def test_names_without_end_are_summed() -> None:
    made = KEPT_NAMES + 300
    for number in range(made):
        group_that_ended(f"group {number}")
    assert len(recorders()) == KEPT_CLOSED + 1
    counts = collectives_by_group()
    named = KEPT_NAMES + KEPT_CLOSED + 1
    assert len(counts) == named + 1
    assert counts[ENDED] == made - named
    assert sum(counts.values()) == made
    assert len(counts_of_all_groups()) < 8 * len(counts)


def test_an_open_group_stays_however_many_end_after_it() -> None:
    first = recorder(CountingEngine())
    keep(first)
    for number in range(50):
        group_that_ended(f"group {number}")
    assert recorders()[0] is first
