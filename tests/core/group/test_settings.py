from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sealring.core.engine.cuda.wires import Wire
from sealring.core.group.settings import Settings, read_settings
from sealring.core.schedule import Algorithm, Operation
from sealring.core.schedule.table import parse_table, shipped_table
from sealring.core.settings import with_settings
from sealring.errors import ConfigurationError, named
from tests.workers import Workers

OWN_TABLE = """
[[all_reduce]]
hosts = "one"
ranks = 2
up_to_bytes = [100]
algorithms = ["tree", "parameter_server"]
"""


def own_table(directory: Path) -> Path:
    path = directory / "table.toml"
    path.write_text(OWN_TABLE)
    return path


def test_an_empty_environment_gives_the_defaults() -> None:
    assert read_settings({}) == Settings()


def test_everything_can_be_set(tmp_path: Path) -> None:
    environ = {
        "SEALRING_TRANSPORT": "tcp",
        **with_settings(
            {},
            record_bytes=65536,
            rekey_bytes=1000000,
            algorithm="reduce=ring,broadcast=tree",
            algorithm_table=str(own_table(tmp_path)),
            host="rack-7",
            cuda_wait="stream",
        ),
        "SEALRING_GPU_WIRE": "peer",
    }
    assert read_settings(environ) == Settings(
        "tcp",
        65536,
        1_000_000,
        {Operation.REDUCE: Algorithm.RING, Operation.BROADCAST: Algorithm.TREE},
        parse_table(OWN_TABLE, "own").over(shipped_table()),
        "rack-7",
        Wire.PEER,
        "stream",
    )


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("SEALRING_GPU_WIRE", "rdma", "SEALRING_GPU_WIRE is 'rdma'; set it to one of auto, links"),
        ("SEALRING_TRANSPORT", "udp", "SEALRING_TRANSPORT is 'udp'; set it to one of auto, tcp"),
        ("algorithm", "star", "'star'; set it to one of ring, direct, tree, parameter_server"),
        ("algorithm", "ring,tree", "it names two algorithms for all"),
        ("algorithm", "ring,", "set it to one of ring, direct, tree"),
        ("algorithm", "sum=ring", "'sum' is not an operation, there is all_reduce"),
        ("algorithm", "REDUCE=ring", "'REDUCE' is not an operation"),
        ("algorithm", "gather=ring", "gather has direct"),
        ("algorithm", "reduce=ring,reduce=tree", "it names reduce twice"),
        ("algorithm", 3, '"algorithm" in SEALRING_SETTINGS is 3; set it to a text'),
        ("algorithm_table", "/nowhere/table", "/nowhere/table cannot be read: No such"),
        ("algorithm_table", "/dev/zero", "/dev/zero is larger than 1048576 bytes"),
        ("algorithm_table", __file__, "is not TOML"),
        ("record_bytes", 100, "must be a number from 1024 to 1048576"),
        ("record_bytes", 1025, "must be a multiple of 64"),
        ("record_bytes", -4096, "must be a number from 1024 to 1048576"),
        ("record_bytes", "65536", "must be a number from 1024 to 1048576"),
        ("record_bytes", True, "must be a number from 1024 to 1048576"),
        ("cuda_wait", "gpu", "\"cuda_wait\" in SEALRING_SETTINGS is 'gpu'; set it to one of auto"),
        ("rekey_bytes", 0, "must be a number from 1 to"),
        ("rekey_bytes", 99999999999999, "must be a number from 1 to"),
    ],
)
def test_a_bad_value_is_refused_with_what_is_allowed(name: str, value: object, text: str) -> None:
    environ = {name: str(value)} if name.isupper() else with_settings({}, **{name: value})
    with pytest.raises(ConfigurationError) as refused:
        read_settings(environ)
    assert text in str(refused.value)


def joins(rank: int, world: int) -> None:
    dist.init_process_group("sealring")


@pytest.mark.threat("D3")
def test_ranks_with_different_settings_do_not_form_a_group(workers: Workers) -> None:
    other = {1: with_settings({}, record_bytes=65536)}
    for error in workers.run(joins, world=2, group=False, rank_env=other, errors=True):
        assert named(error) == "handshake.settings_mismatch"
        assert "record_bytes" in str(error)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("algorithm", "all_reduce=tree", "algorithm.all_reduce=3"),
        ("algorithm_table", "", "algorithm_table="),
    ],
)
@pytest.mark.threat("D3")
def test_ranks_that_would_choose_differently_do_not_form_a_group(
    workers: Workers, tmp_path: Path, name: str, value: str, told: str
) -> None:
    other = {1: with_settings({}, **{name: value or str(own_table(tmp_path))})}
    for error in workers.run(joins, world=2, group=False, rank_env=other, errors=True):
        assert named(error) == "handshake.settings_mismatch"
        assert told in str(error)
        assert "record_bytes" not in str(error), "only what differs is of interest"


def algorithms_taken(rank: int, world: int) -> tuple[list[str], Any]:
    for length in (1, 100):
        dist.all_reduce(torch.zeros(length))
    dist.broadcast(torch.zeros(1), 0)
    group: Any = dist.group.WORLD
    taken = [each.algorithm for each in group.recorder.account().collectives[-3:]]
    return taken, group.topology.host_of


def test_a_table_of_ones_own_decides(workers: Workers, tmp_path: Path) -> None:
    env = with_settings({}, algorithm_table=str(own_table(tmp_path)), algorithm="broadcast=ring")
    assert workers.run(algorithms_taken, world=2, env=env) == [
        (["tree", "parameter_server", "ring"], (0, 0))
    ] * 2  # fmt: skip


def test_ranks_say_which_host_they_share(workers: Workers, tmp_path: Path) -> None:
    # The table has a word on one host only, and these are on two.
    table = str(own_table(tmp_path))
    hosts = {
        rank: with_settings({}, algorithm_table=table, host=f"rack-{rank // 2}")
        for rank in range(3)
    }
    taken = workers.run(in_own_group, world=3, group=False, rank_env=hosts)
    assert [topology for _, topology in taken] == [(0, 0, 1)] * 3
    for algorithms, _ in taken:
        assert "parameter_server" not in algorithms[:1]


def in_own_group(rank: int, world: int) -> tuple[list[str], Any]:
    dist.init_process_group("sealring")
    return algorithms_taken(rank, world)


def reduces(rank: int, world: int) -> None:
    for length in (3, 100_000):
        tensor = torch.full((length,), float(rank + 1))
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((length,), 6.0))


@pytest.mark.parametrize("algorithm", [each.name.lower() for each in Algorithm])
def test_the_algorithm_can_be_chosen(workers: Workers, algorithm: str) -> None:
    workers.run(reduces, world=3, env=with_settings({}, algorithm=algorithm))
