"""`sealring bench algorithms`: what it measures, and that its table can be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sealring.bench.algorithms import candidates, plan_of
from sealring.cli.bench.algorithms import parse_hosts
from sealring.errors import ConfigurationError
from sealring.schedule import Algorithm, Operation, Topology
from sealring.schedule.table import Placement, parse_table
from tests.cli.test_commands import sealring


def test_it_measures_every_algorithm_and_writes_the_table(tmp_path: Path) -> None:
    file = tmp_path / "table.toml"
    done = sealring(
        "bench", "algorithms", "--ranks", "4", "--hosts", "2", "--only", "broadcast",
        "--sizes", "1KiB,256KiB", "--blocks", "3", "--table", str(file), "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    cells = report["cases"]
    assert [(cell["bytes"], cell["algorithm"]) for cell in cells] == [
        (size, name)
        for size in (1024, 256 << 10)
        for name in ("ring", "direct", "tree", "hierarchical")
    ]
    assert {(cell["ranks"], cell["hosts"], cell["blocks"]) for cell in cells} == {(4, "several", 3)}
    assert all(cell["us"] >= cell["fastest_us"] > 0 for cell in cells)
    assert file.read_text() == report["table"]
    table = parse_table(report["table"], "written")
    assert table.rows.keys() == {(Operation.BROADCAST, Placement.SEVERAL)}
    for size in (1024, 256 << 10):
        times = {cell["algorithm"]: cell["fastest_us"] for cell in cells if cell["bytes"] == size}
        chosen = table.row(Operation.BROADCAST, Placement.SEVERAL, 4).at(size).name.lower()
        # Noise decides between equals, and a change has its price; not between twice as fast.
        assert times[chosen] < 2 * min(times.values())


def test_the_workers_of_a_job_measure_themselves(tmp_path: Path) -> None:
    file = tmp_path / "table.toml"
    done = sealring(
        "run", "-n", "2", "-m", "sealring.cli", "bench", "algorithms", "--launched",
        "--only", "reduce", "--sizes", "1KiB", "--blocks", "3", "--table", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert parse_table(file.read_text(), "written").rows.keys() == {
        (Operation.REDUCE, Placement.ONE)
    }


def test_a_hierarchy_of_one_host_is_not_measured_twice() -> None:
    one, two = Topology((0, 0)), Topology((0, 1))
    assert Algorithm.HIERARCHICAL not in candidates(Operation.ALL_REDUCE, one)
    assert candidates(Operation.ALL_REDUCE, two) == list(Algorithm)


@pytest.mark.parametrize("hosts", ["0", "3", "5", "x", "1,,2"])
def test_ranks_that_do_not_fit_the_hosts(hosts: str) -> None:
    with pytest.raises(ConfigurationError, match="4 ranks can be on 1 host"):
        parse_hosts(hosts, 4)


def test_hosts_as_people_write_them() -> None:
    assert parse_hosts("1,2,each", 4) == [1, 2, 4]
    assert parse_hosts("1,each", 1) == [1]


def test_an_operation_without_a_choice() -> None:
    with pytest.raises(ConfigurationError, match="'barrier' is not an operation with a choice"):
        plan_of(["barrier"], [1024])
