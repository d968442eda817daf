"""Whatever was being written, a full disk gives one named error."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from typer.testing import CliRunner

from sealring.cli import app
from sealring.errors import DiskFull
from sealring.vault import CheckpointWriter, Vault, key_file


def fill(folder: Path) -> None:
    """Fills the disk until there is no byte and no file name left."""
    with contextlib.suppress(OSError), (folder / "fills").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with contextlib.suppress(OSError):
        for number in range(1_000_000):
            (folder / f"name-{number}").touch()


def sh(*arguments: str) -> None:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=True)
    if result.exception is not None:
        raise result.exception


@pytest.fixture
def disk(small_disk: Path, tmp_path: Path) -> Path:
    """A disk with a vault, whose key is elsewhere; another vault with 16 MiB is beside the disk."""
    sh("vault", "init", str(small_disk / "v"), "--key", str(tmp_path / "k"))
    sh("vault", "init", str(tmp_path / "other"), "--key", str(tmp_path / "k"), "--name", "me")
    (tmp_path / "large").write_bytes(bytes(16 << 20))
    sh("vault", "seal", str(tmp_path / "other"), str(tmp_path / "large"), "--key",
       str(tmp_path / "k"))  # fmt: skip
    return small_disk


COMMANDS = {
    "an authority": "ca init {disk}/ca",
    "an authority's files": "ca init {disk}",
    "a vault": "vault init {disk}/another --key {out}/k",
    "a vault's object": "vault seal {disk}/v {out}/large --key {out}/k",
    "plaintext of a vault": "vault open {out}/other large --out {disk}/opened --key {out}/k",
    "a log": "audit init {disk}/log --log example.org/log --key {out}/log.key",
}


@pytest.mark.parametrize("what", COMMANDS)
def test_a_command_names_a_full_disk(what: str, disk: Path, tmp_path: Path) -> None:
    fill(disk)
    command = COMMANDS[what].format(disk=disk, out=tmp_path)
    with pytest.raises(DiskFull, match=r"cannot be (written|made): No space left .* Free some"):
        sh(*command.split())


@pytest.mark.parametrize("helper", [False, True])
def test_a_checkpoint_names_a_full_disk(helper: bool, disk: Path, tmp_path: Path) -> None:
    """The named error comes from this process and from the one that seals for it."""
    vault = Vault.open(disk / "v", key_file(tmp_path / "k"))
    writer = CheckpointWriter(vault, "run", helper=helper)
    with pytest.raises(CheckpointException) as failed:
        _save_state_dict({"weight": torch.zeros(4 << 20)}, writer, no_dist=True)
    ((cause, _),) = failed.value.failures.values()
    assert isinstance(cause, DiskFull)
    assert "rank-00000 cannot be written: No space left on device" in str(cause)
