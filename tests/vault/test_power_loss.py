"""After a power cut that loses all that was not synced, the vault holds what it held, or more."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from sealring.formats.files import replace_private, sync_directory, write_public
from sealring.vault import CheckpointWriter, Vault, keys, trees
from tests.vault.power import Disk
from tests.vault.test_checkpoints import load, same, save, state
from tests.workers import SECRET

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    monkeypatch.setenv("SEALRING_JOB", "tests")


def seal_more(vault: Vault) -> None:
    trees.seal_path(vault, Path(__file__), "more", None, lambda _: None)


def save_again(vault: Vault) -> None:
    writer = CheckpointWriter(vault, "run", keep=1)
    dcp.save(state(2), storage_writer=writer)


@pytest.mark.parametrize(
    "action",
    [
        save_again,
        seal_more,
        lambda vault: vault.rekey(),
        lambda vault: trees.rotate(vault, lambda _: None),
    ],
    ids=["save", "seal", "rekey", "rotate"],
)
@pytest.mark.threat("V26")
def test_a_power_cut_after_each_sync(
    action: Callable[[Vault], None], vault: Vault, key: Path, tmp_path: Path
) -> None:
    save(vault, 1)
    place = tmp_path / "after"
    disk = Disk(vault.path.local)
    seen: list[int] = []

    def cut() -> None:
        disk.after_a_power_cut(place)
        left = Vault.open(place, keys.key_file(key))
        loaded = load(left)
        assert same(loaded, state(loaded["step"]))
        for stored in left.newest():
            trees.verify(stored, lambda _: None)
        seen.append(loaded["step"])
        shutil.rmtree(place)

    with disk.recording(cut):
        action(vault)
    assert seen[0] == 1
    assert seen == sorted(seen)
    assert seen[-1] == (2 if action is save_again else 1)
    assert len(seen) > 5


def test_the_disk_of_this_test_loses_what_was_not_synced(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    disk = Disk(root)
    with disk.recording(lambda: None):
        (root / "file").write_bytes(b"content")
        sync_directory(root)
    disk.after_a_power_cut(tmp_path / "after")
    assert (tmp_path / "after" / "file").read_bytes() == b""


@pytest.mark.parametrize(
    "write",
    [
        keys.make_key_file,
        keys.make_identity,
        lambda path: write_public(path, b"content"),
        lambda path: replace_private(path, b"content"),
    ],
    ids=["key file", "identity", "public", "private"],
)
@pytest.mark.threat("V26")
def test_a_key_that_was_written_is_there_after_a_power_cut(
    write: Callable[[Path], object], tmp_path: Path
) -> None:
    """Else a vault can be there without the only key that opens it."""
    root = tmp_path / "root"
    root.mkdir()
    disk = Disk(root)
    with disk.recording(lambda: None):
        write(root / "key")
        disk.after_a_power_cut(tmp_path / "after")
    written = (root / "key").read_bytes()
    assert [one.name for one in (tmp_path / "after").iterdir()] == ["key"]
    assert (tmp_path / "after" / "key").read_bytes() == written != b""
