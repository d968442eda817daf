from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sealring.errors import ConfigurationError, SettingsMismatch
from sealring.group.settings import Settings, read_settings
from sealring.schedule import Algorithm
from tests.workers import Workers


def test_an_empty_environment_gives_the_defaults() -> None:
    assert read_settings({}) == Settings()


def test_everything_can_be_set(tmp_path: Path) -> None:
    environ = {
        "SEALRING_TRANSPORT": "tcp",
        "SEALRING_RECORD_BYTES": "65536",
        "SEALRING_REKEY_BYTES": "1000000",
        "SEALRING_ALGORITHM": "ring",
        "SEALRING_TRACE_DIR": str(tmp_path / "new"),
        "SEALRING_TRACE_SIGNAL": "USR1",
    }
    assert read_settings(environ) == Settings(
        "tcp", 65536, 1_000_000, Algorithm.RING, tmp_path / "new", signal.SIGUSR1
    )
    assert (tmp_path / "new").is_dir()


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("SEALRING_TRANSPORT", "udp", "SEALRING_TRANSPORT is 'udp'; set it to one of auto, tcp"),
        (
            "SEALRING_ALGORITHM",
            "star",
            "'star'; set it to one of ring, direct, tree, parameter_server",
        ),
        ("SEALRING_RECORD_BYTES", "100", "must be a number from 1024 to 1048576"),
        ("SEALRING_RECORD_BYTES", "1025", "must be a multiple of 64"),
        ("SEALRING_RECORD_BYTES", "-4096", "must be a number from 1024 to 1048576"),
        ("SEALRING_TRACE_DIR", "/dev/null/traces", "cannot be made: Not a directory"),
        ("SEALRING_TRACE_SIGNAL", "KILL", "is 'KILL'; set it to USR1 or USR2"),
        ("SEALRING_TRACE_SIGNAL", "USR1", "SEALRING_TRACE_DIR is not: say where"),
        ("SEALRING_REKEY_BYTES", "0", "must be a number from 1 to"),
        ("SEALRING_REKEY_BYTES", "99999999999999", "must be a number from 1 to"),
    ],
)
def test_a_bad_value_is_refused_with_what_is_allowed(name: str, value: str, text: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read_settings({name: value})
    assert text in str(refused.value)


def joins(rank: int, world: int) -> None:
    dist.init_process_group("sealring")


def test_ranks_with_different_settings_do_not_form_a_group(workers: Workers) -> None:
    other = {1: {"SEALRING_RECORD_BYTES": "65536"}}
    for error in workers.run(joins, world=2, group=False, rank_env=other, errors=True):
        assert type(error) is SettingsMismatch
        assert "record_bytes" in str(error)


def reduces(rank: int, world: int) -> None:
    for length in (3, 100_000):
        tensor = torch.full((length,), float(rank + 1))
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((length,), 6.0))


@pytest.mark.parametrize("algorithm", [each.name.lower() for each in Algorithm])
def test_the_algorithm_can_be_chosen(workers: Workers, algorithm: str) -> None:
    workers.run(reduces, world=3, env={"SEALRING_ALGORITHM": algorithm})
