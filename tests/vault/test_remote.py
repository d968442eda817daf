"""Versions in stores: the manifest is the commit, and a store is believed as little as a disk."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from sealring.errors import (
    DiskFull,
    ForeignPart,
    MissingPart,
    NoSuchObject,
    RolledBack,
    StoreFailed,
    TruncatedFile,
    UnsafePath,
    Unsupported,
    VaultError,
)
from sealring.vault import Vault, keys, remote, trees
from sealring.vault.stores import Store
from tests.vault.conftest import clear_memory_store

SIZES = (0, 16384, 100_001)


def seal(vault: Vault, marker: bytes) -> int:
    source = vault.path.parent / "source"
    source.mkdir(exist_ok=True)
    for size in SIZES:
        (source / f"{size}").write_bytes(marker * size)
    return trees.seal_path(vault, source, "data", None, lambda _: None)


def elsewhere(vault: Vault, key: Path) -> Vault:
    """The same vault on another machine: its header, and no objects."""
    other = vault.path.with_name("elsewhere")
    shutil.rmtree(other, ignore_errors=True)
    (other / "objects").mkdir(parents=True)
    shutil.copy(vault.path / "vault.json", other)
    return Vault.open(other, keys.key_file(key))


def content(vault: Vault) -> bytes:
    out = vault.path.parent / "out"
    trees.open_object(vault.find("data"), out, lambda _: None)
    found = b"".join((out / str(size)).read_bytes() for size in SIZES)
    shutil.rmtree(out)
    return found


def whole(marker: bytes) -> bytes:
    return marker * sum(SIZES)


def push(vault: Vault, url: str) -> int:
    return remote.push(vault, "data", url, None, lambda _: None)


def pull(vault: Vault, url: str, version: int | None = None) -> int:
    return remote.pull(vault, "data", url, version, lambda _: None)


def test_a_version_goes_to_a_store_and_comes_back(vault: Vault, key: Path, url: str) -> None:
    for marker in (b"1", b"2"):
        seal(vault, marker)
        push(vault, url)
    assert push(vault, url) == 2  # once more: nothing changes
    other = elsewhere(vault, key)
    assert pull(other, url) == 2
    assert content(other) == whole(b"2")
    assert pull(other, url, 1) == 1
    assert other.find("data").manifest.object_version == 2
    # Under a new key the store's copy is replaced.
    trees.rotate(vault, lambda _: None)
    push(vault, url)
    other = elsewhere(vault, key)
    assert pull(other, url) == 2
    assert content(other) == whole(b"2")


class Killed(BaseException):
    pass


@pytest.fixture
def pushed(vault: Vault) -> str:
    """The URL of a store in memory, which has version 1."""
    clear_memory_store()
    url = "memory://place"
    seal(vault, b"1")
    push(vault, url)
    return url


def test_killed_at_every_step_the_version_before_is_whole(
    vault: Vault, key: Path, pushed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal(vault, b"2")
    steps = [0]
    last = [0]

    def counted(method: str) -> None:
        real = getattr(Store, method)

        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            steps[0] += 1
            if steps[0] == last[0]:
                if method == "upload":  # half of it is there
                    self.put(args[1], b"half", new=False)
                raise Killed
            return real(self, *args, **kwargs)

        monkeypatch.setattr(Store, method, step)

    for method in ("size", "upload", "put", "names", "remove"):
        counted(method)
    found = []
    for last[0] in range(1, 100):
        steps[0] = 0
        try:
            push(vault, pushed)
            break
        except Killed:
            stop, last[0] = last[0], 0
            other = elsewhere(vault, key)
            found.append(pull(other, pushed))
            assert content(other) == whole(str(found[-1]).encode())
            last[0] = stop
    last[0] = 0
    assert pull(elsewhere(vault, key), pushed) == 2
    assert found[0] == 1
    assert found == sorted(found)
    assert len(found) > 6


def test_an_older_state_of_the_store_is_seen(
    vault: Vault, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledgers = tmp_path / "ledgers"
    ledgers.mkdir()
    monkeypatch.setenv("SEALRING_VAULT_LEDGER", str(ledgers))
    fresh = Vault.open(vault.path, keys.key_file(key))
    url = f"file://{tmp_path / 'remote'}"
    seal(fresh, b"1")
    push(fresh, url)
    seal(fresh, b"2")
    with pytest.raises(RolledBack):
        pull(elsewhere(fresh, key), url)


def flipped(content: bytes, place: int) -> bytes:
    changed = bytearray(content)
    changed[place] ^= 1
    return bytes(changed)


def test_two_pulls_at_once(
    vault: Vault, key: Path, pushed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one finds what the first has fetched so far, and leaves it alone."""
    other = elsewhere(vault, key)
    real, found = Store.download, []
    second = threading.Thread(
        target=lambda: found.append(pull(Vault.open(other.path, keys.key_file(key)), pushed))
    )

    def slow(self: Any, *args: Any) -> None:
        if not second.is_alive() and not found:
            second.start()
            second.join(0.5)
        real(self, *args)

    monkeypatch.setattr(Store, "download", slow)
    found.append(pull(other, pushed))
    second.join(60)
    assert found == [1, 1]
    assert content(other) == whole(b"1")


def test_a_store_that_sends_other_bytes_than_it_said(
    vault: Vault, key: Path, pushed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for came, about in (
        (b"more" * (1 << 20), "were asked for, and 4194304 came"),
        (b"", "other bytes than the store said"),
    ):
        monkeypatch.setattr(
            MemoryFileSystem, "cat_file", lambda self, path, start, end, came=came: came
        )
        with pytest.raises(StoreFailed, match=about):
            pull(elsewhere(vault, key), pushed)


def test_a_disk_that_is_full_is_not_the_stores_fault(
    vault: Vault, key: Path, pushed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = elsewhere(vault, key)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull, match="cannot be written: No space left"):
        pull(other, pushed)
    assert not list(other.path.rglob("manifest"))
    assert not list(other.path.rglob("key.json"))


def test_a_hostile_store(vault: Vault, key: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'remote'}"
    seal(vault, b"1")
    push(vault, url)
    [manifest] = (tmp_path / "remote").rglob("manifest")
    parts = sorted(one for one in manifest.parent.iterdir() if one.name.isdigit())
    large = max(parts, key=lambda one: one.stat().st_size)
    original = {one: one.read_bytes() for one in (*parts, manifest)}
    for path, bad in (
        (parts[2], original[parts[2]][:-1]),
        (parts[2], bytes(len(original[parts[2]]))),
        (large, flipped(original[large], 20_000)),  # in its second chunk
        (large, flipped(original[large], -1)),
        (manifest, b"junk"),
        (manifest, original[manifest][:-1]),
    ):
        path.write_bytes(bad)
        other = elsewhere(vault, key)
        with pytest.raises((NoSuchObject, StoreFailed)):
            pull(other, url)
        assert not [one for one in other.path.rglob("*") if one.name == "manifest"]
        path.write_bytes(original[path])
    # Versions that do not open hide none below them.
    junk = manifest.parents[1].with_name("0000000009") / "00000000"
    junk.mkdir(parents=True)
    (junk / "manifest").write_bytes(b"junk")
    (junk / "key.json").write_bytes(b"{}")
    other = elsewhere(vault, key)
    assert pull(other, url) == 1
    assert content(other) == whole(b"1")


def test_a_key_that_is_too_large_hides_no_version_below_it(
    vault: Vault, key: Path, pushed: str
) -> None:
    """It was StoreFailed: who owns the store could keep all versions from being pulled."""
    folder = vault.find("data").copy.folder.relative_to(vault.path).as_posix()
    above = folder.replace("/0000000001/", "/0000000009/")
    store = Store(pushed)
    store.put(f"{above}/key.json", bytes((64 << 10) + 1), new=True)
    store.put(f"{above}/manifest", b"junk", new=True)
    other = elsewhere(vault, key)
    assert pull(other, pushed) == 1
    assert content(other) == whole(b"1")


def test_a_manifest_that_is_removed_while_it_is_pushed(
    vault: Vault, key: Path, pushed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there when it is put, and gone when it is compared."""
    real = Store.put

    def put(self: Store, path: str, content: bytes, *, new: bool) -> None:
        try:
            real(self, path, content, new=new)
        finally:
            if new and path.endswith("/manifest"):
                self.remove(path)
                raise FileExistsError(path)

    monkeypatch.setattr(Store, "put", put)
    assert push(vault, pushed) == 1
    assert pull(elsewhere(vault, key), pushed) == 1


def test_a_store_that_is_not_there(vault: Vault) -> None:
    seal(vault, b"1")
    with pytest.raises(Unsupported, match="no vault is used in a store of the kind 'nosuch'"):
        push(vault, "nosuch://place")
    clear_memory_store()
    with pytest.raises(NoSuchObject, match="has no version of 'data'"):
        pull(vault, "memory://empty")


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("link", UnsafePath),
        ("pipe", UnsafePath),
        ("gone", MissingPart),
        ("cut", TruncatedFile),
        ("other", ForeignPart),
    ],
)
def test_only_the_files_that_the_manifest_lists_are_pushed(
    what: str, error: type[VaultError], vault: Vault
) -> None:
    """The owner of the vault's disk had any file that a link leads to pushed, in plaintext."""
    clear_memory_store()
    seal(vault, b"1")
    folder = vault.find("data").copy.folder
    part = folder / "00000002"
    secret = vault.path.parent / "secret"
    secret.write_bytes(b"a private key of the user who pushes")
    content = part.read_bytes()
    part.unlink()
    if what == "link":
        part.symlink_to(secret)
    elif what == "pipe":
        os.mkfifo(part)
    elif what == "cut":
        part.write_bytes(content[:-1])
    elif what == "other":
        part.write_bytes(bytes(len(content)))
    with pytest.raises(error, match="part 00000002 of 'data' version 1"):
        push(vault, "memory://place")
    found = [one.getvalue() for one in MemoryFileSystem.store.values()]
    assert not any(b"a private key" in one for one in found)
    assert not any(one.endswith("/manifest") for one in MemoryFileSystem.store)


@pytest.mark.parametrize("place", ["object", "version"])
def test_a_link_in_the_vault_is_not_the_stores_fault(
    place: str, vault: Vault, key: Path, pushed: str, tmp_path: Path
) -> None:
    """It was NoSuchObject: the store had no version that opens, said the message."""
    other = elsewhere(vault, key)
    folder = other.folder_of("data")
    (tmp_path / "behind").mkdir()
    if place == "version":
        folder.mkdir()
        folder /= "0000000001"
    folder.symlink_to(tmp_path / "behind")
    with pytest.raises(UnsafePath, match="is a symlink"):
        pull(other, pushed)
    assert not list((tmp_path / "behind").iterdir())
