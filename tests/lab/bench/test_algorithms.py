"""`python -m sealring.lab algorithms`: what it measures, and that its table can be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sealring.core.schedule import Algorithm, Operation, Topology
from sealring.core.schedule.table import Placement, parse_table
from sealring.errors import ConfigurationError
from sealring.lab.__main__ import app, parse_hosts
from sealring.lab.bench.algorithms import candidates, plan_of
from tests.workers import Workers


def test_it_measures_every_algorithm_and_writes_the_table(tmp_path: Path) -> None:
    file = tmp_path / "table.toml"
    arguments = [
        "algorithms", "--ranks", "2", "--hosts", "each", "--only", "broadcast",
        "--sizes", "1KiB,256KiB", "--blocks", "3", "--table", str(file), "--json",
    ]  # fmt: skip
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    cells = report["cases"]
    assert [(cell["bytes"], cell["algorithm"]) for cell in cells] == [
        (size, name)
        for size in (1024, 256 << 10)
        for name in ("ring", "direct", "tree", "hierarchical")
    ]
    seen = {(cell["ranks"], cell["hosts"], cell["blocks"]) for cell in cells}
    assert seen == {(2, "one_rank_each", 3)}
    assert all(cell["us"] >= cell["fastest_us"] > 0 for cell in cells)
    assert file.read_text() == report["table"]
    table = parse_table(report["table"], "written")
    assert table.rows.keys() == {(Operation.BROADCAST, Placement.ONE_RANK_EACH)}
    for size in (1024, 256 << 10):
        times = {cell["algorithm"]: cell["fastest_us"] for cell in cells if cell["bytes"] == size}
        row = table.row(Operation.BROADCAST, Placement.ONE_RANK_EACH, 2)
        chosen = row.at(size).name.lower()
        # Noise decides between equals, and a change has its cost; neither doubles the time.
        assert times[chosen] < 2 * min(times.values())


def launched(rank: int, world: int, file: str) -> str:
    done = CliRunner().invoke(
        app,
        ["algorithms", "--launched", "--only", "reduce", "--sizes", "1KiB",
         "--blocks", "3", "--table", file, "--json"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_workers_of_a_job_measure_themselves(workers: Workers, tmp_path: Path) -> None:
    file = tmp_path / "table.toml"
    first, *others = workers.run(launched, str(file), world=3, group=False)
    assert others == ["", ""], "rank 0 speaks for all"
    cells = json.loads(first)["cases"]
    assert {(cell["ranks"], cell["hosts"]) for cell in cells} == {(3, "one")}
    table = parse_table(file.read_text(), "written")
    assert table.rows.keys() == {(Operation.REDUCE, Placement.ONE)}


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
