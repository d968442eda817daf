"""Directories and files that the owner of a vault's disk adds to it."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from sealring.errors import NotAVault, NotGranted, UnsafePath
from sealring.vault import CheckpointWriter, Vault, keys, trees
from sealring.vault.files import remove_directory
from tests.workers import SECRET

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def nothing(count: int) -> None:
    """Progress that no one looks at."""


@pytest.fixture
def key(tmp_path: Path) -> Path:
    keys.make_key_file(tmp_path / "vault.key")
    return tmp_path / "vault.key"


@pytest.fixture
def vault(tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> Vault:
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    monkeypatch.setenv("SEALRING_JOB", "tests")
    return Vault.create(tmp_path / "vault", keys.key_file(key), "owner")


def put(vault: Vault, folder: Path, text: str) -> int:
    (folder / "source").write_text(text)
    return trees.seal_path(vault, folder / "source", "data", None, nothing)


def get(vault: Vault, out: Path) -> str:
    trees.open_object(vault.find("data"), out, nothing)
    return out.read_text()


def objects_of(vault: Vault) -> Path:
    (found,) = (vault.path / "objects").iterdir()
    return found


@pytest.mark.parametrize("number", ["0000000002", "9999999999"])
def test_an_empty_version_with_any_number_hides_no_later_one(
    number: str, vault: Vault, key: Path, tmp_path: Path
) -> None:
    put(vault, tmp_path, "one")
    (objects_of(vault) / number).mkdir()
    assert put(vault, tmp_path, "two") == (3 if number == "0000000002" else 2)
    assert get(Vault.open(vault.path, keys.key_file(key)), tmp_path / "out") == "two"


def test_symlinks_in_the_place_of_an_object(vault: Vault, tmp_path: Path) -> None:
    """A save that removes old versions would remove what the link leads to."""
    state: Any = {"a": torch.ones(2)}
    dcp.save(state, storage_writer=CheckpointWriter(vault, "run"))
    mine = objects_of(vault)
    elsewhere = tmp_path / "precious"
    mine.rename(elsewhere)
    (elsewhere / "2026111601").mkdir()
    (elsewhere / "2026111601" / "notes.txt").write_text("not the vault's")
    mine.symlink_to(elsewhere)
    before = sorted(elsewhere.rglob("*"))
    with pytest.raises(CheckpointException) as raised:
        dcp.save(state, storage_writer=CheckpointWriter(vault, "run", keep=1))
    ((problem, _),) = raised.value.failures.values()
    assert type(problem) is UnsafePath
    assert sorted(elsewhere.rglob("*")) == before
    with pytest.raises(UnsafePath, match="is a symlink"):
        vault.find("run")


@pytest.mark.parametrize("level", [1, 2, 3])
def test_removal_follows_no_symlink(level: int, tmp_path: Path) -> None:
    """Also if the link appears after the names were read."""
    inside = Path("objects", "id", "version")
    (tmp_path / "elsewhere" / "id" / "version").mkdir(parents=True)
    kept = tmp_path / "elsewhere" / "id" / "version" / "manifest"
    kept.touch()
    link = tmp_path / "vault" / Path(*inside.parts[:level])
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "elsewhere" / Path(*inside.parts[1:level]))
    with pytest.raises(UnsafePath):
        remove_directory(tmp_path / "vault", tmp_path / "vault" / inside, first="manifest")
    assert kept.exists()


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("change", ["revoke", "rekey", "rotate"])
def test_junk_keeps_no_holder_from_being_revoked(
    change: str, complete: bool, vault: Vault, key: Path, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    keys.make_key_file(tmp_path / "second")
    second = keys.key_file(tmp_path / "second")
    vault.grant("second", second)
    put(vault, tmp_path, "one")
    junk = vault.path / "objects" / ("0" * 32) / "0000000001" / "00000000"
    junk.mkdir(parents=True)
    (junk / "key.json").write_text("{}")
    if complete:
        (junk / "manifest").write_text("junk")

    def act() -> None:
        if change == "revoke":
            vault.revoke("second")
        elif change == "rekey":
            vault.rekey()
        else:
            trees.rotate(vault, nothing)

    if complete:
        with pytest.raises(NotAVault, match=r"1 in all did not open.*vault rekey"):
            act()
    else:
        with caplog.at_level(logging.WARNING, logger="sealring"):
            act()
        assert "is no complete copy and is left" in caplog.text
    with pytest.raises(NotGranted):
        Vault.open(vault.path, second)
    # All that is genuine has the new key, and junk that only looks complete keeps the older ones.
    fresh = Vault.open(vault.path, keys.key_file(key))
    assert fresh.find("data").copy.vault_key == 2
    assert bool(fresh.header.older) == complete
    assert get(fresh, tmp_path / "out") == "one"


def test_a_folder_that_cannot_be_read_is_not_left_out(
    vault: Vault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sealring.errors import ConfigurationError

    (tmp_path / "folder" / "closed").mkdir(parents=True)
    (tmp_path / "folder" / "file").touch()
    real: Any = os.scandir

    def scandir(path: Any = ".") -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ConfigurationError, match="closed cannot be read: Permission denied"):
        trees.seal_path(vault, tmp_path / "folder", "data", None, nothing)
    assert list(vault.newest()) == []


def test_empty_folders_come_back(vault: Vault, tmp_path: Path) -> None:
    (tmp_path / "folder" / "empty" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "file").write_text("x")
    trees.seal_path(vault, tmp_path / "folder", "data", None, nothing)
    content = json.loads(vault.find("data").manifest.content)
    assert content["folders"] == ["empty/inner"]
    trees.open_object(vault.find("data"), tmp_path / "out", nothing)
    assert (tmp_path / "out" / "empty" / "inner").is_dir()
    assert (tmp_path / "out" / "file").read_text() == "x"
