"""Objects that cannot be read or written, because of access rights or a full disk."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer

import sealring.cli
from sealring.errors import (
    BadSource,
    DiskFull,
    ForeignPart,
    NotAVault,
    UnsafePath,
)
from sealring.vault import Vault, files, keys, objects, trees


def nothing(count: int) -> None:
    """A progress callback that does nothing."""


@pytest.fixture
def key(tmp_path: Path) -> keys.SymmetricKey:
    keys.make_key_file(tmp_path / "vault.key")
    return keys.key_file(tmp_path / "vault.key")


@pytest.fixture
def vault(tmp_path: Path, key: keys.SymmetricKey) -> Vault:
    made = Vault.create(tmp_path / "vault", key, "owner")
    for name in ("one", "two"):
        trees.seal_path(made, Path(__file__), name, None, nothing)
    return made


@pytest.mark.threat("V50")
def test_a_rotation_on_a_full_disk_leaves_nothing_and_can_be_repeated(
    vault: Vault, key: keys.SymmetricKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = vault.find("one")
    version = stored.copy.folder.parent
    objects.new_copy(version, vault.ring, vault.header.vault, stored.copy.place.suite)
    # A killed rotation leaves a second copy like this one.
    assert len(list(version.local.iterdir())) == 2

    @contextmanager
    def full(self: object, name: str) -> Iterator[int]:
        with open("/dev/full", "wb", buffering=0) as file:
            yield file.fileno()

    with monkeypatch.context() as patch:
        patch.setattr("sealring.vault.objects.Copy.new_part", full)
        for _ in range(2):
            with pytest.raises(DiskFull, match=r"cannot be written.*2 in all"):
                trees.rotate(vault, nothing)
            assert list(version.local.iterdir()) == [stored.copy.folder.local]
    assert trees.rotate(Vault.open(vault.path, key), nothing).versions == 2
    left = Vault.open(vault.path, key)
    assert not left.header.older
    trees.verify(left.find("one"), nothing)


def test_a_file_that_cannot_be_read_is_named(
    vault: Vault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed").touch()
    real: Any = os.open

    def call(path: Any, *others: Any, **named: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *others, **named)

    monkeypatch.setattr(os, "open", call)
    with pytest.raises(BadSource, match="closed cannot be read: Permission denied"):
        trees.seal_path(vault, tmp_path / "closed", "new", None, nothing)
    assert [one.manifest.name for one in vault.newest()] == ["one", "two"]


@pytest.mark.threat("V49")
def test_a_symlink_in_the_place_of_all_objects(
    vault: Vault, key: keys.SymmetricKey, tmp_path: Path
) -> None:
    (vault.path / "objects").local.rename(tmp_path / "elsewhere")
    (vault.path / "objects").local.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafePath, match="objects is a symlink"):
        Vault.open(vault.path, key)


def test_a_command_on_a_full_disk_ends_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        raise OSError(28, "No space left on device", "/somewhere")

    monkeypatch.setattr(typer.main, "get_command", lambda _: command)
    with pytest.raises(SystemExit) as ended:
        sealring.cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.split("\n")[0] == (
        "configuration.disk_full: /somewhere cannot be written: No space left on device. "
        "Free some space there or choose another disk, and run it again"
    )


@pytest.mark.threat("V42")
def test_a_manifest_with_anothers_name_or_version(
    vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A holder of the key wrote the name, whose control characters would reach the terminal."""
    stored = vault.find("one")
    manifest = stored.manifest
    for name, error, words in (
        ("a\x1b]0;owned\x1b[2J", NotAVault, "cannot be printed"),
        ("two", ForeignPart, "manifest of another object, 'two'"),
    ):
        stored.copy.commit("files", name, manifest.parts, manifest.content)
        with pytest.raises(error, match=words):
            list(vault.newest())
    place = stored.copy.place
    other = dataclasses.replace(manifest, object_version=7)
    text = json.dumps(dataclasses.asdict(other)).encode()
    (stored.copy.folder / "manifest").local.write_bytes(place.seal("manifest", text))
    with pytest.raises(ForeignPart, match="is that of version 7"):
        vault.find("one")


@pytest.mark.parametrize("verb", ["seal", "rm", "rotate"])
def test_a_disk_that_is_full_at_an_objects_key(
    verb: str, vault: Vault, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, content: bytes) -> None:
        path.write_bytes(content[:7])
        raise OSError(errno.ENOSPC, "No space left on device")

    verbs: dict[str, Callable[[], object]] = {
        "seal": lambda: trees.seal_path(vault, Path(__file__), "one", None, nothing),
        "rm": lambda: vault.remove("one"),
        "rotate": lambda: trees.rotate(vault, nothing),
    }
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_new", full)
        error = DiskFull if verb == "rotate" else OSError
        with pytest.raises(error, match="No space left on device"):
            verbs[verb]()
    assert len(list(vault.path.local.rglob("key.json"))) == 2
    vault.rekey()
    assert not caplog.records
    verbs[verb]()


@pytest.mark.parametrize(
    "lacking", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE]
)
@pytest.mark.threat("V28")
def test_a_process_that_lacks_something_is_not_given_an_older_version(
    lacking: int, vault: Vault, key: keys.SymmetricKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed call tells nothing about what is there, so an older version is not used instead."""
    recorded = (vault.path / "ledger.json").local.read_bytes()
    trees.seal_path(vault, Path(__file__), "one", None, nothing)
    real = {name: getattr(os, name) for name in ("open", "scandir", "lstat")}
    left = 0

    def calling(name: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left == -1:
                raise OSError(lacking, os.strerror(lacking))
            return real[name](*given, **named)

        return call

    for name in real:
        monkeypatch.setattr(os, name, calling(name))
    for step in range(100):
        left = 1000
        # This ledger is that of a machine that does not know the newer version.
        (vault.path / "ledger.json").local.write_bytes(recorded)
        opened = Vault.open(vault.path, key)
        left = step
        try:
            assert opened.find("one").manifest.object_version == 2
        except (OSError, NotAVault) as problem:
            found = problem if isinstance(problem, OSError) else problem.__cause__
            assert isinstance(found, OSError)
            assert found.errno == lacking
        if left >= 0:
            break
    assert 5 < step < 99
