"""`sealring vault push`, `pull` and `rm`, and vaults in stores, as a person types them."""

from __future__ import annotations

import json
import shutil

import pytest

from sealring.errors import (
    ConfigurationError,
    ForeignVault,
    NoSuchObject,
    NotGranted,
    OutputExists,
    RolledBack,
    Unsupported,
)
from tests.vault.conftest import clear_memory_store
from tests.vault.test_commands import Shell, sh

__all__ = ["sh"]
STORE = "memory://commands"


@pytest.fixture(autouse=True)
def empty_store() -> None:
    clear_memory_store()


def elsewhere(sh: Shell) -> None:
    """The same vault on another machine: its header, and no objects."""
    shutil.rmtree(sh.folder / "other", ignore_errors=True)
    (sh.folder / "other" / "objects").mkdir(parents=True)
    shutil.copy(sh.folder / "v" / "vault.json", sh.folder / "other")


def test_push_and_pull_say_what_they_did(sh: Shell) -> None:
    sh("seal", "v", "f")
    pushed = json.loads(sh("push", "v", "f", STORE, "--json"))
    assert (pushed, sh.status) == ({"name": "f", "version": 1, "url": STORE}, 0)
    (sh.folder / "f").write_bytes(b"newer")
    sh("seal", "v", "f")
    assert f"Version 2 of f is in {STORE}." in sh("push", "v", "f", STORE)
    elsewhere(sh)
    pulled = json.loads(sh("pull", "other", "f", STORE, "--version", "1", "--json"))
    assert (pulled, sh.status) == ({"name": "f", "version": 1, "vault": "other"}, 0)
    assert "all of it found authentic" in sh("pull", "other", "f", STORE)
    sh("open", "other", "f", "--out", "g")
    assert (sh.folder / "g").read_bytes() == b"newer"


def test_what_push_and_pull_refuse(sh: Shell) -> None:
    with pytest.raises(NoSuchObject, match="'f' is not in v"):
        sh("push", "v", "f", STORE)
    sh("seal", "v", "f")
    with pytest.raises(NoSuchObject, match="'f' has no version 7 in v: it has 1"):
        sh("push", "v", "f", STORE, "--version", "7")
    with pytest.raises(NoSuchObject, match=f"{STORE} has no version of 'f'"):
        sh("pull", "v", "f", STORE)
    with pytest.raises(Unsupported, match="a store of the kind 'nosuch'"):
        sh("push", "v", "f", "nosuch://place")
    with pytest.raises(ForeignVault):
        sh("push", "v", "f", STORE, "--vault-id", "00" * 16)
    sh("push", "v", "f", STORE)
    sh("init", "w", "--key", "k2")
    sh("seal", "w", "f", "--key", "k2")
    with pytest.raises(ForeignVault, match="choose another place"):
        sh("push", "w", "f", STORE, "--key", "k2")
    with pytest.raises(NotGranted):
        sh("pull", "v", "f", STORE, "--key", "k2")


def test_an_older_copy_of_the_vault_does_not_replace_a_newer_header(sh: Shell) -> None:
    sh("seal", "v", "f")
    shutil.copytree(sh.folder / "v", sh.folder / "before")
    sh("rekey", "v")
    sh("push", "v", "f", STORE)
    with pytest.raises(RolledBack, match="Push from the newest"):
        sh("push", "before", "f", STORE)


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
    with pytest.raises(OutputExists, match="is there already"):
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
    with pytest.raises(Unsupported, match="lies in a store"):
        sh("push", STORE, "f", "memory://other")
