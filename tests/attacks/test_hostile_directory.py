"""Attacks by the owner of a vault's disk, who adds directories and files to the vault."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan

from sealring import _native
from sealring.errors import (
    ConfigurationError,
    NotAVault,
    UnsafePath,
    VaultError,
)
from sealring.vault import CheckpointReader, CheckpointWriter, Vault, keys, trees
from sealring.vault.files import move_into_place, remove_directory, unfinished
from tests.codes import coded
from tests.workers import SECRET

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def nothing(count: int) -> None:
    """A progress callback that does nothing."""


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
    (found,) = (vault.path / "objects").local.iterdir()
    return found


@pytest.mark.parametrize("number", ["0000000002", "9999999999"])
@pytest.mark.threat("V48")
def test_an_empty_version_with_any_number_hides_no_later_one(
    number: str, vault: Vault, key: Path, tmp_path: Path
) -> None:
    put(vault, tmp_path, "one")
    (objects_of(vault) / number).mkdir()
    assert put(vault, tmp_path, "two") == (3 if number == "0000000002" else 2)
    assert get(Vault.open(vault.path, keys.key_file(key)), tmp_path / "out") == "two"


@pytest.mark.threat("V49")
def test_symlinks_in_the_place_of_an_object(vault: Vault, tmp_path: Path) -> None:
    """A save that removes old versions would remove files outside the vault through the link."""
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


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_something_else_than_a_file_in_the_place_of_a_part(
    make: Callable[[Path], None], vault: Vault, tmp_path: Path
) -> None:
    """A directory can have the same length as the part, so its length does not give it away."""
    (tmp_path / "like").mkdir()
    size = (tmp_path / "like").stat().st_size
    length = next((n for n in range(size) if _native.sealed_length(n) == size), 100)
    put(vault, tmp_path, "x" * length)
    stored = vault.find("data")
    part = stored.copy.folder / stored.manifest.parts[0].name
    part.local.unlink()
    make(part.local)
    with pytest.raises(UnsafePath, match="is not a regular file"):
        trees.verify(stored, lambda _: None)


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.threat("V49")
def test_removal_follows_no_symlink(level: int, tmp_path: Path) -> None:
    """Covers a link that appears only after the names were read."""
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


def test_a_folder_that_cannot_be_read_is_not_left_out(
    vault: Vault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


# ---- an exchanged vault, and what a killed process leaves ----------------------------------------


@pytest.mark.threat("V23")
def test_a_vault_that_was_exchanged_for_another_of_the_same_key(
    vault: Vault, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both vaults open and are genuine; a ledger elsewhere remembers which one was at this path."""
    (tmp_path / "ledgers").mkdir()
    monkeypatch.setenv("SEALRING_VAULT_LEDGER", str(tmp_path / "ledgers"))
    Vault.open(vault.path, keys.key_file(key))
    other = Vault.create(tmp_path / "other", keys.key_file(key), "owner")
    vault.path.local.rename(tmp_path / "moved")
    other.path.local.rename(vault.path.local)
    with pytest.raises(
        VaultError, match=f"and held {vault.header.id}", check=coded("vault.foreign")
    ):
        Vault.open(vault.path, keys.key_file(key))
    # A vault that is newly created at this path is accepted.
    vault.path.local.rename(tmp_path / "away")
    made = Vault.create(vault.path, keys.key_file(key), "owner")
    assert Vault.open(vault.path, keys.key_file(key)).header.id == made.header.id


@pytest.mark.threat("V42")
def test_control_characters_in_a_header(vault: Vault, key: Path) -> None:
    path = vault.path / "vault.json"
    document = json.loads(path.local.read_text())
    document["grants"][0] |= {"name": "\x1b]0;title\x07", "kind": "person"}
    path.local.write_text(json.dumps(document))
    with pytest.raises(NotAVault, match="cannot be printed") as raised:
        Vault.open(vault.path, keys.key_file(key))
    assert "\x1b" not in str(raised.value)


@pytest.mark.threat("V42")
def test_a_header_that_is_large(vault: Vault, key: Path) -> None:
    with (vault.path / "vault.json").local.open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(NotAVault, match="is larger than"):
        Vault.open(vault.path, keys.key_file(key))


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
@pytest.mark.threat("V43")
def test_plaintext_of_a_process_that_was_ended(
    end: signal.Signals, vault: Vault, key: Path, tmp_path: Path
) -> None:
    put(vault, tmp_path, "plaintext " * 5000)
    folder = tmp_path / "outputs"
    folder.mkdir()
    code = (
        "import sys, time; from pathlib import Path\n"
        "from sealring.vault import Vault, keys, trees\n"
        "def wait(count): print('there', flush=True); time.sleep(100)\n"
        "vault = Vault.open(Path(sys.argv[1]), keys.key_file(Path(sys.argv[2])))\n"
        "trees.open_object(vault.find('data'), Path(sys.argv[3]), wait)\n"
    )
    command = [sys.executable, "-c", code, str(vault.path), str(key), str(folder / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        live = list(folder.iterdir())
        assert len(live) == 1
        trees.open_object(vault.find("data"), folder / "out2", nothing)
        with contextlib.ExitStack() as stack:
            # A process that writes to the same path must not remove the first one's live output.
            stack.enter_context(unfinished(folder / "out"))
            assert live[0].exists()
        process.send_signal(end)
        process.wait(30)
    left = [path for path in folder.iterdir() if path.name != "out2"]
    assert left == (live if end == signal.SIGKILL else [])
    trees.open_object(vault.find("data"), folder / "out", nothing)
    assert sorted(path.name for path in folder.iterdir()) == ["out", "out2"]


def test_a_save_leaves_what_another_process_writes_under_the_same_name(vault: Vault) -> None:
    state: Any = {"a": torch.ones(2)}
    writer = CheckpointWriter(vault, "run")
    writer.set_up_storage_writer(True)
    writer.prepare_global_plan([SavePlan([])])
    dcp.save(state, storage_writer=CheckpointWriter(vault, "run"))
    assert len(vault.incomplete("run")) == 1
    writer.set_up_storage_writer(True)  # after a failure, this writer gives up its version
    dcp.save(state, storage_writer=CheckpointWriter(vault, "run"))
    assert vault.incomplete("run") == []


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_file_system_without_exclusive_renames(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS lacks exclusive renames; an existing output must still never be replaced."""

    class Library:
        def __init__(self, *arguments: object, **named: object) -> None:
            """Takes the arguments of ctypes.CDLL."""

        def renameat2(self, *arguments: object) -> int:
            ctypes.set_errno(errno.EINVAL)
            return -1

    monkeypatch.setattr("sealring.vault.files.ctypes.CDLL", Library)
    made, target = tmp_path / "made", tmp_path / "target"
    for attempt in range(2):
        if kind == "file":
            made.write_text(str(attempt))
        else:
            made.mkdir()
            (made / "file").write_text(str(attempt))
        if attempt == 0:
            move_into_place(made, target)
        else:
            with pytest.raises(VaultError, check=coded("vault.output_exists")):
                move_into_place(made, target)
    assert (target if kind == "file" else target / "file").read_text() == "0"


@pytest.mark.parametrize("keep", [1, 2, None])
@pytest.mark.threat("V48")
def test_versions_that_only_look_complete(
    keep: int | None, vault: Vault, key: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such versions do not count among those to keep, and are never found as the newest."""

    def save(value: float) -> None:
        writer = CheckpointWriter(vault, "run", keep=keep)
        dcp.save({"w": torch.full((4,), value)}, storage_writer=writer)

    for value in (1.0, 2.0):
        save(value)
    for number in ("0000000003", "9999999998", "9999999999"):
        junk = objects_of(vault) / number / "aaaaaaaa"
        junk.mkdir(parents=True)
        (junk / "manifest").touch()
    save(3.0)
    left = sorted(int(one.name) for one in objects_of(vault).iterdir())
    genuine = {1: [4], 2: [2, 4], None: [1, 2, 4]}[keep]
    assert left == sorted([*genuine, 3, 9999999998, 9999999999])
    # A reader whose ledger is still empty ignores such versions too.
    (vault.path / "ledger.json").local.unlink()
    fresh = Vault.open(vault.path, keys.key_file(key))
    into = {"w": torch.zeros(4)}
    with caplog.at_level(logging.WARNING, logger="sealring"):
        dcp.load(into, storage_reader=CheckpointReader(fresh, "run"))
    assert bool((into["w"] == 3).all())
    assert "9999999999 is left out" in caplog.text
    with pytest.raises(NotAVault):
        fresh.find("run", 9999999999)
