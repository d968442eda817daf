"""`sealring vault rm`, and vaults in stores, as a person types them."""

from __future__ import annotations

import json

import pytest

from sealring.errors import (
    ConfigurationError,
    NoSuchObject,
    VaultError,
)
from tests.codes import coded
from tests.vault.conftest import clear_memory_store
from tests.vault.test_commands import Shell, sh

__all__ = ["sh"]
STORE = "memory://commands"


@pytest.fixture(autouse=True)
def empty_store() -> None:
    clear_memory_store()


def test_rm_asks_and_says_what_it_did(sh: Shell) -> None:
    for _ in range(3):
        sh("seal", "v", "f")
    sh("rm", "v", "f")  # no answer to the question
    assert sh.status == 1
    removed = json.loads(sh("rm", "v", "f", "--version", "1", "--yes", "--json"))
    assert (removed, sh.status) == ({"name": "f", "version": 1, "removed": 1}, 0)
    with pytest.raises(NoSuchObject, match="has no version 1"):
        sh("rm", "v", "f", "--version", "1", "--yes")
    with pytest.raises(ConfigurationError, match="is the newest of 'f'"):
        sh("rm", "v", "f", "--version", "3", "--yes")
    removed = json.loads(sh("rm", "v", "f", "--yes", "--json"))
    assert removed == {"name": "f", "version": None, "removed": 2}
    with pytest.raises(NoSuchObject, match="was removed"):
        sh("open", "v", "f", "--out", "g")
    with pytest.raises(NoSuchObject, match="'nothing' is not in v"):
        sh("rm", "v", "nothing", "--yes")


def test_the_verbs_take_the_url_of_a_store(sh: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="set SEALRING_VAULT_LEDGER to a folder"):
        sh("init", STORE)
    (sh.folder / "ledgers").mkdir()
    monkeypatch.setenv("SEALRING_VAULT_LEDGER", str(sh.folder / "ledgers"))
    sh("init", STORE)
    with pytest.raises(VaultError, match="is there already", check=coded("vault.output_exists")):
        sh("init", STORE)
    sh("seal", STORE, "f")
    sh("grant", STORE, "--name", "second", "--to-key", "k2")
    sh("revoke", STORE, "second")
    sh("rotate", STORE)
    (row,) = json.loads(sh("ls", STORE, "--json"))["objects"]
    assert (row["name"], row["version"]) == ("f", 1)
    assert "1 of 1 versions" in sh("verify", STORE)
    sh("open", STORE, "f", "--out", "g")
    assert (sh.folder / "g").read_bytes() == b"content"
    sh("rm", STORE, "f", "--yes")
    assert json.loads(sh("ls", STORE, "--json"))["objects"] == []
