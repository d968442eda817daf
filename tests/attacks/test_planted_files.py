"""Another process of the same user plants files where a vault locks or makes a folder."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from sealring.errors import NoSuchObject, UnsafePath
from sealring.vault import Vault, keys, trees
from tests.vault.test_checkpoints import load, refused, same, save, state
from tests.workers import SECRET

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.fixture
def vault(tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> Vault:
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    monkeypatch.setenv("SEALRING_JOB", "tests")
    return Vault.create(tmp_path / "vault", keys.key_file(key), "owner")


def a_socket(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)  # the relative name keeps the socket's address short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


@pytest.mark.parametrize("name", ["lock", "ledger.json.lock"])
@pytest.mark.parametrize("kind", ["symlink", "directory", "socket"])
@pytest.mark.threat("V41")
def test_what_is_no_file_in_the_place_of_a_lock(
    kind: str, name: str, vault: Vault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This once raised a bare OSError."""
    save(vault, 1)
    path = vault.path / name
    path.local.unlink(missing_ok=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"another's")
    make: dict[str, Callable[[], object]] = {
        "symlink": lambda: path.local.symlink_to(elsewhere),
        "directory": path.local.mkdir,
        "socket": lambda: a_socket(path.local, monkeypatch),
    }
    make[kind]()
    refused(lambda: save(vault, 2), UnsafePath, f"{path} is not what a lock is held on")
    assert elsewhere.read_bytes() == b"another's"
    path.local.rmdir() if kind == "directory" else path.local.unlink()
    save(vault, 3)
    assert same(load(vault), state(3))


@pytest.mark.parametrize("level", ["objects", "object"])
@pytest.mark.threat("V41")
def test_a_pipe_in_the_place_of_a_folder_that_is_made(level: str, vault: Vault) -> None:
    """This once raised a bare FileExistsError or NotADirectoryError."""
    folder = vault.folder_of("run")
    path = folder if level == "object" else folder.parent
    if level == "objects":
        path.local.rmdir()
    os.mkfifo(path.local)
    refused(lambda: save(vault, 1), UnsafePath, "something that is no directory lies there")
    with pytest.raises(NoSuchObject):
        vault.find("run")


@pytest.mark.parametrize("kind", ["dangling link", "link", "file", "pipe", "directory of another"])
@pytest.mark.threat("V41")
def test_what_is_planted_as_an_unfinished_output_stops_no_open(
    kind: str, vault: Vault, tmp_path: Path
) -> None:
    """Others may write to this directory, too. A planted file once raised UnsafePath."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.write_bytes(b"content")
    trees.seal_path(vault, source, "object", None, lambda _: None)
    planted, elsewhere = tmp_path / ".out.sealring-unfinished-0123456789abcdef", tmp_path / "kept"
    elsewhere.mkdir()
    (elsewhere / "file").write_bytes(b"another's")
    make: dict[str, Callable[[], object]] = {
        "dangling link": lambda: planted.symlink_to("nowhere"),
        "link": lambda: planted.symlink_to(elsewhere),
        "file": planted.touch,
        "pipe": lambda: os.mkfifo(planted),
        "directory of another": lambda: planted.mkdir(mode=0o000),
    }
    make[kind]()
    trees.open_object(vault.find("object"), out, lambda _: None)
    assert out.read_bytes() == b"content"
    assert (elsewhere / "file").read_bytes() == b"another's"
    assert os.path.lexists(planted) == (kind != "directory of another" or os.getuid() != 0)


@pytest.mark.threat("V41")
def test_a_directory_in_the_place_of_a_manifest_is_removed_with_its_object(vault: Vault) -> None:
    """`rm` once failed with a bare IsADirectoryError, and the object could not be removed."""
    save(vault, 1)
    folder = vault.find("run").copy.folder
    (folder / "manifest").local.unlink()
    (folder / "manifest").local.mkdir()
    (folder / "manifest" / "file").local.touch()
    vault.remove("run")
    assert not folder.local.exists()
    with pytest.raises(NoSuchObject):
        vault.find("run")
