"""Saves and loads of one name at the same time, by several processes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from sealring.vault import CheckpointReader, CheckpointWriter, Vault, keys
from sealring.vault.storage import VaultPath
from tests.workers import SECRET

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.fixture
def vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Vault:
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    monkeypatch.setenv("SEALRING_JOB", "tests")
    keys.make_key_file(tmp_path / "vault.key")
    return Vault.create(tmp_path / "vault", keys.key_file(tmp_path / "vault.key"), "owner")


def opened_again(vault: Vault) -> Vault:
    """Opens the vault again, as another process would."""
    return Vault.open(vault.path, keys.key_file(vault.path.local.parent / "vault.key"))


def save(vault: Vault, value: float, keep: int | None = None) -> None:
    mine = opened_again(vault)
    dcp.save(
        {"w": torch.full((4,), value)}, storage_writer=CheckpointWriter(mine, "run", keep=keep)
    )


def versions(vault: Vault) -> list[int]:
    (folder,) = (vault.path / "objects").local.iterdir()
    return sorted(int(one.name) for one in folder.iterdir())


@pytest.mark.threat("P10")
def test_a_save_that_ends_while_another_looks_for_what_was_left(
    vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other version is listed as unfinished, but is committed before it is removed."""
    writer = CheckpointWriter(vault, "run")
    real = Vault.incomplete
    started, listed = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def first(self: Vault, name: str, **options: Any) -> list[VaultPath]:
        """Lists unfinished versions, then lets the other save finish before their removal."""
        found = real(self, name, **options)
        listed.set()
        threads[0].join(3)
        return found

    def other() -> None:
        mine = opened_again(vault)
        real_version = mine.new_version

        def begun(*arguments: Any) -> Any:
            made = real_version(*arguments)
            started.set()
            listed.wait(3)
            return made

        setattr(mine, "new_version", begun)  # noqa: B010
        dcp.save({"w": torch.ones(4)}, storage_writer=CheckpointWriter(mine, "run"))

    threads.append(threading.Thread(target=other))
    threads[0].start()
    assert started.wait(30)
    monkeypatch.setattr(Vault, "incomplete", first)
    dcp.save({"w": torch.zeros(4)}, storage_writer=writer)
    threads[0].join()
    assert versions(vault) == [1, 2]
    assert vault.find("run", 1).manifest.kind == "checkpoint"


@pytest.mark.threat("P10")
def test_what_is_being_read_is_removed_by_a_later_save(vault: Vault) -> None:
    for value in (1.0, 2.0):
        save(vault, value)
    reader = opened_again(vault)
    with reader.reading():
        save(vault, 3.0, keep=1)
        assert versions(vault) == [1, 2, 3]
        assert reader.find("run", 2).manifest.object_version == 2
    save(vault, 4.0, keep=1)
    assert versions(vault) == [4]
    into = {"w": torch.zeros(4)}
    dcp.load(into, storage_reader=CheckpointReader(vault, "run"))
    assert bool((into["w"] == 4).all())


@pytest.mark.threat("P10")
def test_many_saves_of_one_name_at_once(vault: Vault) -> None:
    failed: list[BaseException] = []

    def one(value: float) -> None:
        try:
            save(vault, value)
        except BaseException as problem:
            failed.append(problem)

    threads = [threading.Thread(target=one, args=(float(value),)) for value in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(versions(vault)) == 6
    assert vault.incomplete("run") == []
