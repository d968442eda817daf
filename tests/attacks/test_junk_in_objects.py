"""Pipes, symlinks and directories that the disk's owner puts between a vault's objects."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from sealring.errors import NotAVault, UnsafePath, VaultError, WrongKey
from sealring.vault import CheckpointReader, CheckpointWriter, Vault, keys, trees
from sealring.vault.storage import VaultPath
from tests.codes import coded

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized"
)
VERBS: dict[str, Callable[[Vault], object]] = {
    "revoke": lambda vault: vault.revoke("second"),
    "rekey": lambda vault: vault.rekey(),
    "rotate": lambda vault: trees.rotate(vault, lambda _: None),
}


@pytest.fixture
def key(tmp_path: Path) -> keys.SymmetricKey:
    keys.make_key_file(tmp_path / "vault.key")
    return keys.key_file(tmp_path / "vault.key")


@pytest.fixture
def vault(tmp_path: Path, key: keys.SymmetricKey) -> Vault:
    made = Vault.create(tmp_path / "vault", key, "owner")
    keys.make_key_file(tmp_path / "second")
    made.grant("second", keys.key_file(tmp_path / "second"))
    for name in ("one", "two"):
        trees.seal_path(made, Path(__file__), name, None, lambda _: None)
    return made


@contextmanager
def pipe(path: Path) -> Iterator[None]:
    """Makes a pipe and holds it open for writing, so a read of it blocks or gives nothing."""
    os.mkfifo(path)
    file = os.open(path, os.O_RDWR)
    try:
        yield
    finally:
        os.close(file)


def refuse(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Makes the folder unreadable, as for a user without rights; root would still read it."""
    scandir: Any = os.scandir
    lstat: Any = os.lstat

    def list_names(path: Any = ".") -> Any:
        if isinstance(path, Path) and folder in (path, *path.parents):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    def look(path: Any, **named: Any) -> Any:
        if isinstance(path, Path) and folder in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return lstat(path, **named)

    monkeypatch.setattr(os, "scandir", list_names)
    monkeypatch.setattr(os, "lstat", look)


CLOSED = {"a closed object": 1, "a closed version": 2, "a closed copy": 3}
PIPES = ("a pipe as key.json", "a pipe as manifest")


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", ["no manifest", "files that are none", *PIPES, *CLOSED])
@pytest.mark.threat("V50")
def test_junk_keeps_no_holder_from_being_revoked(
    verb: str, kind: str, vault: Vault, key: keys.SymmetricKey, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    # This id sorts before all others, so the real objects come after the junk.
    ids = Path("0" * 32, "0000000001", "00000000")
    junk = vault.path.local / "objects" / ids
    junk.mkdir(parents=True)
    with ExitStack() as stack:
        if kind in CLOSED:
            patch = stack.enter_context(monkeypatch.context())
            refuse(patch, vault.path.local / "objects" / Path(*ids.parts[: CLOSED[kind]]))
        for name in ("key.json", "manifest") if kind not in CLOSED else ():
            if kind == f"a pipe as {name}":
                stack.enter_context(pipe(junk / name))
            elif kind != f"no {name}":
                (junk / name).write_bytes(b"{}")
        if kind == "no manifest":
            VERBS[verb](vault)
            assert "is no complete copy and is left" in caplog.text
        else:
            words = r"1 in all did not open.*vault rotate --keys-only"
            with pytest.raises(NotAVault, match=words):
                VERBS[verb](vault)
            problems: list[VaultError] = []
            assert len(list(Vault.open(vault.path, key).newest(problems))) == 2
            assert [type(one) for one in problems] == [NotAVault]
    with pytest.raises(VaultError, check=coded("vault.not_granted")):
        Vault.open(vault.path, keys.key_file(tmp_path / "second"))
    # All genuine objects have the new key; junk that only looks complete keeps the older keys.
    fresh = Vault.open(vault.path, key)
    assert {fresh.find(one).copy.vault_key for one in ("one", "two")} == {2}
    assert bool(fresh.header.older) == (kind != "no manifest")
    trees.verify(fresh.find("one"), lambda _: None)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("depth", [0, 1], ids=["object", "version"])
def test_an_object_behind_a_symlink_is_named_and_its_key_is_kept(
    verb: str, depth: int, vault: Vault, key: keys.SymmetricKey, tmp_path: Path
) -> None:
    place = [*vault.find("one").copy.folder.local.parents][1 - depth]
    away = tmp_path / "away"
    place.rename(away)
    place.symlink_to(away)
    with pytest.raises(UnsafePath, match="is a symlink: a vault has none"):
        VERBS[verb](vault)
    place.unlink()
    away.rename(place)
    assert Vault.open(vault.path, key).find("one").manifest.name == "one"


@pytest.mark.parametrize("verb", VERBS)
def test_an_object_that_is_not_there_is_reported(
    verb: str, vault: Vault, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="sealring")
    place = vault.find("one").copy.folder.local.parents[1]
    place.rename(tmp_path / "away")
    VERBS[verb](vault)
    assert f"object {place.name}, which" in caplog.text
    (tmp_path / "away").rename(place)
    with pytest.raises(WrongKey, match="which its header no longer has"):
        vault.find("one")


@pytest.mark.parametrize("verb", VERBS)
def test_a_ledger_that_cannot_be_written_changes_no_key(verb: str, vault: Vault) -> None:
    lock = vault.path / "ledger.json.lock"
    lock.local.unlink()
    lock.local.mkdir()
    before = (vault.path / "vault.json").local.read_bytes()
    with pytest.raises(UnsafePath, match=r"ledger.json.lock is not what a lock is held on"):
        VERBS[verb](vault)
    assert (vault.path / "vault.json").local.read_bytes() == before
    lock.local.rmdir()
    VERBS[verb](vault)
    assert vault.find("two").copy.vault_key == vault.ring.newest == 2


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEALRING_SECRET", os.urandom(32).hex())
    monkeypatch.setenv("SEALRING_JOB", "tests")


def save(vault: Vault, value: float) -> None:
    writer = CheckpointWriter(vault, "run", keep=1)
    dcp.save({"x": torch.full((3,), value)}, storage_writer=writer, no_dist=True)


def load(vault: Vault) -> float:
    state = {"x": torch.zeros(3)}
    dcp.load(state, storage_reader=CheckpointReader(vault, "run"), no_dist=True)
    return float(state["x"][0])


@pytest.mark.usefixtures("worker")
def test_versions_that_cannot_be_removed_do_not_fail_a_save(
    vault: Vault, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="sealring")
    save(vault, 1.0)
    first = vault.find("run").copy.folder.parent
    remove = Vault.remove_version

    def refuse(self: Vault, version: VaultPath) -> None:
        if version == first:
            raise PermissionError(13, "Permission denied", str(version))
        remove(self, version)

    monkeypatch.setattr(Vault, "remove_version", refuse)
    save(vault, 2.0)
    assert load(vault) == 2.0
    assert f"{first} is not removed" in caplog.text


@pytest.mark.usefixtures("worker")
def test_a_version_that_cannot_be_read_does_not_fail_a_save(
    vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(vault, 1.0)
    junk = vault.find("run").copy.folder.local.parents[1] / "0000000009"
    junk.mkdir()
    scandir: Any = os.scandir

    def list_names(path: Any = ".") -> Any:
        if path == junk:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", list_names)
    save(vault, 2.0)
    assert load(vault) == 2.0
    monkeypatch.undo()
    shutil.rmtree(junk)
