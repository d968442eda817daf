"""An attacker removes the disk with a vault's ledger, so that an old copy would be accepted."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from sealring.errors import ConfigurationError, RolledBack
from sealring.vault import Vault, keys, trees


@pytest.mark.threat("V15")
def test_a_ledger_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="sealring")
    disk = tmp_path / "disk"
    (disk / "ledgers").mkdir(parents=True)
    monkeypatch.setenv("SEALRING_VAULT_LEDGER", str(disk / "ledgers"))
    keys.make_key_file(tmp_path / "vault.key")
    key = keys.key_file(tmp_path / "vault.key")
    vault = Vault.create(tmp_path / "vault", key, "owner")
    source = tmp_path / "source"
    for text in ("old", "new"):
        source.write_text(text)
        trees.seal_path(vault, source, "data", None, lambda _: None)
        if text == "old":
            shutil.copytree(vault.path.local, tmp_path / "backup")
    shutil.rmtree(vault.path.local)
    shutil.copytree(tmp_path / "backup", vault.path.local)
    with pytest.raises(RolledBack):
        Vault.open(vault.path, key).find("data")
    disk.rename(tmp_path / "away")
    with pytest.raises(ConfigurationError, match=r"ledgers is no directory.*mkdir -m 700"):
        Vault.open(vault.path, key)
    with pytest.raises(ConfigurationError, match="is no directory"):
        Vault.create(tmp_path / "other", key, "owner")
    assert not disk.exists()
    assert not (tmp_path / "other").exists()
    # An empty directory is accepted, because a new machine has one. The log reports it once.
    assert not caplog.records
    (disk / "ledgers").mkdir(parents=True)
    for _ in range(2):
        Vault.open(vault.path, key).find("data")
    (said,) = [one.getMessage() for one in caplog.records]
    assert f"has recorded nothing of the vault {vault.header.id} yet" in said
