"""Cases are predicted for the algorithms and the transport with which they were measured."""

from __future__ import annotations

import dataclasses

from sealring.core.schedule import Algorithm, Operation
from sealring.core.schedule.table import format_table, shipped_table
from sealring.lab.plan.fit import setting_of
from sealring.lab.plan.layouts import alone
from tests.lab.plan.measured import RATES, results_of
from tests.lab.plan.test_validate import imagined

SIZE = 1 << 20


def chosen(algorithms: str) -> Algorithm:
    results = dataclasses.replace(results_of(imagined()), algorithms=algorithms)
    return setting_of(results, imagined(), "sealed", 4).takes(Operation.ALL_REDUCE, SIZE).algorithm


def test_the_table_is_the_one_of_the_file() -> None:
    tree = shipped_table().fixed_to({Operation.ALL_REDUCE: Algorithm.TREE})
    assert chosen(format_table(tree, {})) is Algorithm.TREE
    assert chosen("") is chosen(format_table(shipped_table(), {})) is not Algorithm.TREE


def test_sockets_of_one_host_cost_more_and_change_no_algorithm() -> None:
    profile = imagined()
    assert profile.sealed is not None
    slow = dataclasses.replace(profile.sealed.between_engine_bytes_per_s, value=RATES["copy"] / 10)
    profile = dataclasses.replace(
        profile, sealed=dataclasses.replace(profile.sealed, between_engine_bytes_per_s=slow)
    )
    results = results_of(imagined())
    shm, tcp = (setting_of(results, profile, "sealed", 4, each) for each in ("shm", "tcp"))
    taken = {each.takes(Operation.ALL_REDUCE, SIZE).algorithm for each in (shm, tcp)}
    assert len(taken) == 1
    assert alone(tcp, Operation.ALL_REDUCE, SIZE) > 1.5 * alone(shm, Operation.ALL_REDUCE, SIZE)
    plain = [setting_of(results, profile, "plain", 4, each) for each in ("shm", "tcp")]
    assert plain[0] == plain[1]
