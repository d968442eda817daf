"""Vaults: grants, keys, objects, and what an adversary with the disk can do to them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.keywrap import (
    aes_key_unwrap_with_padding,
    aes_key_wrap_with_padding,
)

from sealring import _native
from sealring.errors import (
    BadCredential,
    BadSource,
    ConfigurationError,
    ForeignPart,
    MissingPart,
    NoSuchObject,
    NotAVault,
    RolledBack,
    SealringError,
    TamperedChunk,
    TruncatedFile,
    UnsafePath,
    Unsupported,
    VaultError,
)
from sealring.formats.files import write_private
from sealring.vault import header as headers
from sealring.vault import keys, ledger, objects, opened, trees
from sealring.vault.vault import Vault
from tests.codes import coded
from tests.crashes import killed_at


def nothing(count: int) -> None:
    """Progress that no one looks at."""


def seal(vault: Vault, path: Path, name: str = "object") -> int:
    return trees.seal_path(vault, path, name, None, nothing)


def a_file(folder: Path, content: bytes = b"some plaintext that is searched for") -> Path:
    path = folder / "source"
    path.write_bytes(content)
    return path


def files_of(vault: Vault) -> list[Path]:
    return [path for path in vault.path.local.rglob("*") if path.is_file()]


def part_of(vault: Vault, name: str = "object", version: int | None = None) -> Path:
    stored = vault.find(name, version)
    return (stored.copy.folder / stored.manifest.parts[0].name).local


def reopened(vault: Vault, key: Path) -> Vault:
    return Vault.open(vault.path, keys.key_file(key))


def test_key_wrap_is_the_published_one() -> None:
    wrapping = _native.Secret.random(32)
    for size in (7, 8, 31, 32, 96):
        secret = _native.Secret.random(size)
        wrapped = _native.wrap_key(wrapping, secret)
        assert aes_key_unwrap_with_padding(bytes(wrapping), wrapped) == bytes(secret)
        made = aes_key_wrap_with_padding(bytes(wrapping), bytes(secret))
        assert _native.unwrap_key(wrapping, made) == secret
        for at in range(len(wrapped)):
            changed = bytearray(wrapped)
            changed[at] ^= 1
            assert _native.unwrap_key(wrapping, bytes(changed)) is None
        assert _native.unwrap_key(wrapping, wrapped[:-8]) is None
    for wrong in (b"", b"x" * 15, b"x" * 17, b"x" * 10000):
        assert _native.unwrap_key(wrapping, wrong) is None


@pytest.mark.threat("V44")
def test_a_folder_comes_back_and_no_name_or_content_is_on_the_disk(
    vault: Vault, key: Path, tmp_path: Path
) -> None:
    source = tmp_path / "private-folder"
    (source / "nested").mkdir(parents=True)
    (source / "empty").write_bytes(b"")
    (source / "nested" / "secret-name").write_bytes(b"searchable plaintext " * 2000)
    script = source / "script.sh"
    script.write_bytes(b"#!/bin/sh\n")
    script.chmod(0o755)
    assert seal(vault, source, "private-object") == 1
    trees.open_object(reopened(vault, key).find("private-object"), tmp_path / "out", nothing)
    for path in source.rglob("*"):
        twin = tmp_path / "out" / path.relative_to(source)
        assert path.is_dir() == twin.is_dir()
        if path.is_file():
            assert path.read_bytes() == twin.read_bytes()
            assert twin.stat().st_mode & 0o777 == (0o700 if path == script else 0o600)
    on_disk = b"".join(path.read_bytes() + str(path).encode() for path in files_of(vault))
    for word in (b"private-", b"secret-name", b"nested", b"searchable plaintext", b"script"):
        assert word not in on_disk


def test_versions_of_a_name(vault: Vault, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        assert seal(vault, a_file(tmp_path, b"%d" % number)) == number
    trees.open_object(vault.find("object", 2), tmp_path / "two", nothing)
    trees.open_object(vault.find("object"), tmp_path / "newest", nothing)
    assert (tmp_path / "two").read_bytes() == b"2"
    assert (tmp_path / "newest").read_bytes() == b"3"
    with pytest.raises(NoSuchObject, match=r"no version 4.*it has 1, 2, 3"):
        vault.find("object", 4)
    with pytest.raises(NoSuchObject, match="'other' is not in"):
        vault.find("other")


# ---- grants --------------------------------------------------------------------------------------


@pytest.mark.threat("V17")
def test_each_kind_of_holder_opens_it_and_a_revoked_one_does_not(
    vault: Vault, key: Path, tmp_path: Path
) -> None:
    seal(vault, a_file(tmp_path))
    person = keys.make_identity(tmp_path / "me")
    data = _native.Secret.random(32)
    worker = keys.broker_key("gpt/key/vault", data)
    keys.make_key_file(tmp_path / "second")
    second = keys.key_file(tmp_path / "second")
    vault.grant("me", keys.PublicKey(person.public))
    vault.grant("workers", worker)
    vault.grant("second", second)
    for holder in (person, worker, second):
        assert Vault.open(vault.path, holder).find("object").manifest.name == "object"
    before = (vault.path / "vault.json").local.read_bytes()
    public = keys.PublicKey(person.public)
    assert vault.rekey([worker, second, public]).dropped == []
    for holder in (person, worker, second):
        Vault.open(vault.path, holder).find("object")
    assert vault.revoke("workers", [second, public]).dropped == []
    with pytest.raises(
        VaultError,
        match="not open to gpt/key/vault; it is to owner",
        check=coded("vault.not_granted"),
    ):
        Vault.open(vault.path, worker)
    for holder in (person, second):
        Vault.open(vault.path, holder).find("object")
    # The key that the old header gives away opens nothing that is there now.
    old = headers.open_header(headers.read_header(before, "old"), worker, "old")
    assert old.newest not in vault.ring.keys
    assert not vault.header.older
    with pytest.raises(ConfigurationError, match="no grant named 'workers'"):
        vault.revoke("workers")


def test_the_last_key_that_writes_is_not_revoked(vault: Vault, tmp_path: Path) -> None:
    person = keys.make_identity(tmp_path / "me")
    vault.grant("me", keys.PublicKey(person.public))
    with pytest.raises(ConfigurationError, match="last key that can write"):
        vault.revoke("owner")


@pytest.mark.threat("V8")
def test_a_person_reads_and_does_not_write(vault: Vault, tmp_path: Path) -> None:
    """Anyone can make a header that opens with a public key: data sealed there would be theirs."""
    person = keys.make_identity(tmp_path / "me")
    vault.grant("me", keys.PublicKey(person.public))
    as_person = Vault.open(vault.path, person)
    with pytest.raises(
        VaultError, match="reads a vault and does not write", check=coded("vault.not_granted")
    ):
        seal(as_person, a_file(tmp_path))
    for change in (as_person.rekey, lambda: as_person.revoke("me")):
        with pytest.raises(VaultError, check=coded("vault.not_granted")):
            change()
    with pytest.raises(VaultError, check=coded("vault.not_granted")):
        trees.rotate(as_person, nothing)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
@pytest.mark.threat("V46")
def test_a_key_file_that_others_can_read_is_refused(mode: int, key: Path) -> None:
    key.chmod(mode)
    with pytest.raises(BadCredential, match="chmod 600", check=coded("configuration.bad_key_file")):
        keys.key_file(key)


def test_a_new_key_leaves_no_copy_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []

    def keep(path: Path, content: Any) -> None:
        write_private(path, content)
        written.append(content)

    monkeypatch.setattr("sealring.vault.keys.write_private", keep)
    keys.make_key_file(tmp_path / "new")
    keys.make_identity(tmp_path / "me")
    for content in written:
        assert type(content) is bytearray
        assert not any(content)  # overwritten
    keys.key_file(tmp_path / "new")
    keys.identity(tmp_path / "me")


def test_key_files_that_are_none(tmp_path: Path, key: Path) -> None:
    for content in (b"", b"sealring-key-1 " + b"a" * 63, b"x" * 79, key.read_bytes() + b"more"):
        path = tmp_path / "bad"
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(
            BadCredential, match="is not one that", check=coded("configuration.bad_key_file")
        ):
            keys.key_file(path)
    with pytest.raises(
        BadCredential, match="cannot be read", check=coded("configuration.bad_key_file")
    ):
        keys.key_file(tmp_path / "missing")
    with pytest.raises(ConfigurationError, match="will not be overwritten"):
        keys.make_key_file(key)


def test_public_keys_and_resources_that_are_none(vault: Vault) -> None:
    for public in ("", "sealring-person-1:", "sealring-person-1:AAAA", "age1xyz"):
        with pytest.raises(ConfigurationError, match="no person's public key"):
            keys.PublicKey(public)
    with pytest.raises(ConfigurationError, match="no resource"):
        keys.broker_key("../x", _native.Secret.random(32))
    with pytest.raises(
        BadCredential, match="has 16 bytes", check=coded("configuration.bad_key_file")
    ):
        keys.broker_key("a/b/c", _native.Secret.random(16))


def test_another_key_and_another_vault(vault: Vault, key: Path, tmp_path: Path) -> None:
    keys.make_key_file(tmp_path / "other")
    with pytest.raises(
        VaultError, match="not open to this key file", check=coded("vault.not_granted")
    ):
        Vault.open(vault.path, keys.key_file(tmp_path / "other"))
    with pytest.raises(NotAVault, match="vault init"):
        Vault.open(tmp_path, keys.key_file(key))
    with pytest.raises(VaultError, check=coded("vault.output_exists")):
        Vault.create(vault.path, keys.key_file(key), "owner")


# ---- an adversary with the disk ------------------------------------------------------------------


def change_header(vault: Vault, change: dict[str, Any]) -> None:
    path = vault.path / "vault.json"
    path.local.write_text(json.dumps(json.loads(path.local.read_text()) | change))


@pytest.mark.threat("V7")
def test_a_grant_that_an_attacker_adds(vault: Vault, key: Path, tmp_path: Path) -> None:
    """It would get the next key of the vault at the next rekey."""
    attacker = keys.make_identity(tmp_path / "attacker")
    forged = keys.PublicKey(attacker.public).grant(
        "owner2", vault.header.vault, 1, _native.Secret.random(32)
    )
    grants = json.loads((vault.path / "vault.json").local.read_text())["grants"]
    from dataclasses import asdict

    change_header(vault, {"grants": [*grants, asdict(forged)]})
    with pytest.raises(
        VaultError, match="without the vault's key", check=coded("vault.tampered_header")
    ):
        reopened(vault, key)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"generation": 99}, "vault.tampered_header"),
        ({"suite": "AEAD_CHACHA20_POLY1305"}, "vault.tampered_header"),
        ({"key": 2}, "vault.not_granted"),
        ({"mac": "00" * 32}, "vault.tampered_header"),
        ({"id": "00" * 16}, "vault.not_granted"),
        ({"version": 2}, "vault.later_version"),
        ({"format": "other"}, "vault.not_a_vault"),
        ({"mac": "xyz"}, "vault.not_a_vault"),
        ({"grants": "none"}, "vault.not_a_vault"),
        ({"id": "0000"}, "vault.not_a_vault"),
        ({"more": 1}, "vault.not_a_vault"),
    ],
)
@pytest.mark.threat("V7")
def test_a_changed_header(change: dict[str, Any], code: str, vault: Vault, key: Path) -> None:
    change_header(vault, change)
    with pytest.raises(VaultError, check=coded(code)):
        reopened(vault, key)


def test_a_header_that_is_no_json(vault: Vault, key: Path) -> None:
    (vault.path / "vault.json").local.write_bytes(b"\xff{")
    with pytest.raises(NotAVault, match="is not a vault's header"):
        reopened(vault, key)


@pytest.mark.threat("V10")
def test_parts_that_are_missing_cut_exchanged_or_changed(vault: Vault, tmp_path: Path) -> None:
    seal(vault, a_file(tmp_path, b"first content"), "one")
    seal(vault, a_file(tmp_path, b"other content"), "two")
    seal(vault, a_file(tmp_path, b"newer content"), "one")
    part = part_of(vault, "one")
    good = part.read_bytes()

    def refused(error: type[Exception], what: str) -> None:
        out = tmp_path / "out"
        with pytest.raises(error, match=what):
            trees.open_object(vault.find("one"), out, nothing)
        with pytest.raises(error, match=what):
            trees.verify(vault.find("one"), nothing)
        assert not out.exists()
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".out")]
        part.write_bytes(good)

    whose = "part 00000000 of 'one' version 2"
    part.unlink()
    refused(MissingPart, f"{whose} is missing")
    part.write_bytes(good[:-1])
    refused(TruncatedFile, f"{whose} was cut or extended")
    part.write_bytes(good + b"x")
    refused(TruncatedFile, f"{whose} was cut or extended")
    part.write_bytes(part_of(vault, "two").read_bytes())
    refused(ForeignPart, f"{whose} is not the file that the manifest lists")
    part.write_bytes(part_of(vault, "one", 1).read_bytes())
    refused(ForeignPart, whose)
    part.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    refused(TamperedChunk, f"{whose} was changed in its first 24 bytes")
    part.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    refused(TamperedChunk, whose)
    part.unlink()
    part.symlink_to(part_of(vault, "two"))
    with pytest.raises(UnsafePath, match=whose):
        trees.verify(vault.find("one"), nothing)


@pytest.mark.threat("V10")
def test_manifests_and_keys_that_are_anothers(vault: Vault, tmp_path: Path) -> None:
    seal(vault, a_file(tmp_path), "one")
    seal(vault, a_file(tmp_path), "two")
    one, two = (vault.find(name).copy.folder for name in ("one", "two"))
    for name, errors in (("manifest", ForeignPart), ("key.json", ForeignPart)):
        kept = (one / name).local.read_bytes()
        shutil.copy((two / name).local, (one / name).local)
        with pytest.raises(errors):
            vault.find("one")
        (one / name).local.write_bytes(kept)
    (one / "key.json").local.write_bytes(b"{}")
    with pytest.raises(NotAVault, match=r"key\.json is not an object's key"):
        vault.find("one")


def test_a_later_manifest_is_refused_by_name(vault: Vault, tmp_path: Path) -> None:
    seal(vault, a_file(tmp_path))
    copy = vault.find("object").copy
    later = json.dumps({"format": "sealring object", "version": 3}).encode()
    (copy.folder / "manifest").local.write_bytes(copy.place.seal("manifest", later))
    with pytest.raises(
        NotAVault, match="version 3 of its format", check=coded("vault.later_version")
    ):
        vault.find("object")


def test_an_earlier_manifest_is_refused_by_name(vault: Vault, tmp_path: Path) -> None:
    seal(vault, a_file(tmp_path))
    copy = vault.find("object").copy
    earlier = json.loads(
        copy.place.open("manifest", (copy.folder / "manifest").local.read_bytes(), "the manifest")
    )
    earlier["version"] = 1
    for part in earlier["parts"]:
        del part["hash"]
    sealed = copy.place.seal("manifest", json.dumps(earlier).encode())
    (copy.folder / "manifest").local.write_bytes(sealed)
    with pytest.raises(
        NotAVault, match="export what it holds", check=coded("vault.earlier_version")
    ):
        vault.find("object")


@pytest.mark.threat("V11")
def test_an_older_vault_put_back_is_seen(vault: Vault, key: Path, tmp_path: Path) -> None:
    seal(vault, a_file(tmp_path))
    shutil.copytree((vault.path / "objects").local, tmp_path / "old")
    seal(vault, a_file(tmp_path))
    shutil.rmtree((vault.path / "objects").local)
    shutil.copytree(tmp_path / "old", vault.path.local / "objects")
    with pytest.raises(RolledBack, match=r"last written as version 2.*has version 1"):
        reopened(vault, key).find("object")
    assert vault.find("object", 1).manifest.object_version == 1  # asked for by its number
    assert seal(vault, a_file(tmp_path)) == 3
    shutil.rmtree((vault.path / "objects").local)
    (vault.path / "objects").local.mkdir()
    with pytest.raises(RolledBack, match="has none"):
        vault.find("object")


@pytest.mark.threat("V11")
def test_an_older_header_put_back_is_seen(vault: Vault, key: Path) -> None:
    before = (vault.path / "vault.json").local.read_bytes()
    vault.rekey()
    (vault.path / "vault.json").local.write_bytes(before)
    with pytest.raises(
        RolledBack, match=r"header is number 1 with key 1.*recorded number 3 with key 2"
    ):
        reopened(vault, key)


@pytest.mark.threat("V11")
def test_a_ledger_elsewhere(vault: Vault, key: Path, tmp_path: Path,
                            monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    (tmp_path / "ledgers").mkdir()
    monkeypatch.setenv("SEALRING_VAULT_LEDGER", str(tmp_path / "ledgers"))
    shutil.copytree(vault.path.local, tmp_path / "whole")
    seal(reopened(vault, key), a_file(tmp_path))
    shutil.rmtree(vault.path.local)
    shutil.copytree(tmp_path / "whole", vault.path.local)  # with the ledger that lay in it
    with pytest.raises(RolledBack):
        reopened(vault, key).find("object")


# ---- paths ---------------------------------------------------------------------------------------


def test_other_users_are_let_into_no_folder_of_the_output(vault: Vault, tmp_path: Path) -> None:
    for folder in ("a/b/c", "d/e"):
        (tmp_path / "source" / folder).mkdir(parents=True)
    (tmp_path / "source" / "a" / "b" / "c" / "file").touch()
    seal(vault, tmp_path / "source")
    before = os.umask(0)
    try:
        trees.open_object(vault.find("object"), tmp_path / "out", nothing)
    finally:
        os.umask(before)
    found = [tmp_path / "out", *(tmp_path / "out").rglob("*")]
    assert len(found) == 7
    assert not any(one.stat().st_mode & 0o077 for one in found)


def test_a_folder_that_is_renamed_while_it_is_sealed(vault: Vault, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("a", "b"):
        (source / name).write_text(name)
    left = [1, 1]

    def rename(count: int) -> None:
        left.pop()
        if not left:
            source.rename(tmp_path / "renamed")

    with pytest.raises(
        BadSource, match="was removed while it was sealed", check=coded("vault.source_changed")
    ):
        trees.seal_path(vault, source, "object", None, rename)
    with pytest.raises(NoSuchObject):
        vault.find("object")


@pytest.mark.parametrize("folder", [True, False])
def test_names_that_are_not_unicode_are_not_sealed(
    folder: bool, vault: Vault, tmp_path: Path
) -> None:
    """No manifest with such a name is read again."""
    odd = tmp_path / "source" / os.fsdecode(b"x\xff")
    odd.mkdir(parents=True)
    if not folder:
        odd.rmdir()
        odd.touch()
    with pytest.raises(UnsafePath, match="has a name that is not UTF-8"):
        seal(vault, tmp_path / "source")
    odd.rename(tmp_path / "source" / "\n漢\x1b")
    seal(vault, tmp_path / "source")
    trees.open_object(vault.find("object"), tmp_path / "out", nothing)
    assert os.listdir(tmp_path / "out") == ["\n漢\x1b"]


@pytest.mark.threat("V47")
def test_links_and_devices_are_not_sealed(vault: Vault, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to("/etc/passwd")
    with pytest.raises(UnsafePath, match="link is a symlink"):
        seal(vault, folder)
    with pytest.raises(UnsafePath, match="is a symlink"):
        seal(vault, folder / "link")
    (folder / "link").unlink()
    os.mkfifo(folder / "fifo")
    with pytest.raises(UnsafePath, match="neither a file nor a folder"):
        seal(vault, folder)
    with pytest.raises(ConfigurationError, match="does not exist"):
        seal(vault, folder / "nothing")
    assert list(vault.newest()) == []


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", "", "a//b", "./a", "a\0b"])
@pytest.mark.threat("V47")
def test_paths_that_leave_the_output(path: str, vault: Vault, tmp_path: Path) -> None:
    copy = vault.new_version("object")
    part = copy.write_part("0", b"")
    files = [{"path": path, "part": "0", "executable": False}]
    content = json.dumps({"tree": True, "files": files, "folders": []})
    vault.commit(copy, "files", "object", [part], content)
    with pytest.raises(UnsafePath, match="leads out of its directory"):
        trees.open_object(vault.find("object"), tmp_path / "out", nothing)
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_there(vault: Vault, tmp_path: Path) -> None:
    seal(vault, a_file(tmp_path))
    out = tmp_path / "out"
    for make in (out.touch, out.mkdir, lambda: out.symlink_to("nowhere")):
        make()
        with pytest.raises(VaultError, check=coded("vault.output_exists")):
            trees.open_object(vault.find("object"), out, nothing)
        out.rmdir() if out.is_dir() else out.unlink()


# ---- rotation ------------------------------------------------------------------------------------


@pytest.mark.threat("V17")
def test_rotation_leaves_nothing_under_old_keys(vault: Vault, key: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        seal(vault, a_file(tmp_path, name.encode()), name)
    before = {path.read_bytes() for path in files_of(vault) if path.name == "00000000"}
    assert trees.rotate(vault, nothing).versions == 2
    after = {path.read_bytes() for path in files_of(vault) if path.name == "00000000"}
    assert len(before) == len(after) == 2
    assert not before & after
    fresh = reopened(vault, key)
    assert not fresh.header.older
    for name in ("one", "two"):
        trees.open_object(fresh.find(name), tmp_path / name, nothing)
        assert (tmp_path / name).read_bytes() == name.encode()


@pytest.mark.parametrize("bytes_each", [1, 2, 3, 4])
def test_names_as_long_as_the_file_system_takes(bytes_each: int, tmp_path: Path) -> None:
    name = "aé漢😀"[bytes_each - 1] * (255 // bytes_each)
    key = tmp_path / f"k{name[1:]}"
    keys.make_key_file(key)
    vault = Vault.create(tmp_path / f"v{name[1:]}", keys.key_file(key), "owner")
    seal(vault, a_file(tmp_path, b"x"))
    killed_at(8, lambda: open_with(key, vault.path.local, tmp_path / name))
    assert any("sealring-unfinished" in one.name for one in tmp_path.iterdir())
    open_with(key, vault.path.local, tmp_path / name)
    assert (tmp_path / name).read_bytes() == b"x"
    assert not any("sealring-unfinished" in one.name for one in tmp_path.iterdir())


def open_with(key: Path, vault: Path, out: Path) -> None:
    opened = Vault.open(vault, keys.key_file(key))
    trees.open_object(opened.find("object"), out, nothing)


def test_nothing_is_written_that_is_too_large_to_be_read_again(
    vault: Vault, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal(vault, a_file(tmp_path, b"x"))
    for number in range(30):
        (tmp_path / "many").mkdir(exist_ok=True)
        (tmp_path / "many" / f"{number}").touch()
    monkeypatch.setattr(objects, "LARGEST_MANIFEST", 4000)
    with pytest.raises(Unsupported, match="divide it into several objects"):
        seal(vault, tmp_path / "many", "many")
    size = (vault.path / "ledger.json").local.stat().st_size
    monkeypatch.setattr(ledger, "LARGEST_LEDGER", size)
    seal(vault, tmp_path / "source")
    with pytest.raises(Unsupported, match="make a second vault"):
        seal(vault, tmp_path / "source", "more")
    monkeypatch.undo()
    person = keys.make_identity(tmp_path / "person").public
    size = (vault.path / "vault.json").local.stat().st_size + len(person)
    monkeypatch.setattr(opened, "LARGEST_DOCUMENT", size)
    with pytest.raises(Unsupported, match="the vault's header would have"):
        vault.grant("person", keys.PublicKey(person))
    monkeypatch.undo()
    again = Vault.open(vault.path, keys.key_file(key))
    assert "object" in [one.manifest.name for one in again.newest()]
    with pytest.raises(NoSuchObject):
        again.find("many")


@pytest.mark.parametrize("recorded", [True, False])
def test_a_seal_that_is_interrupted_behind_its_commit(
    recorded: bool, vault: Vault, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = a_file(tmp_path, b"x")
    seal(vault, source)
    record = vault.ledger.record

    def interrupted(*given: Any) -> None:
        if recorded:
            record(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(vault.ledger, "record", interrupted)
    with pytest.raises(KeyboardInterrupt):
        seal(vault, source)
    assert Vault.open(vault.path, keys.key_file(key)).find("object").manifest.object_version == 2


@pytest.mark.parametrize("what", ["rotate", "rekey", "seal"])
@pytest.mark.threat("V26")
def test_killed_at_every_step_the_vault_opens(
    what: str, vault: Vault, key: Path, tmp_path: Path
) -> None:
    source = a_file(tmp_path, b"x" * 40000)
    seal(vault, source)
    place = tmp_path / "copy"

    def action() -> None:
        mine = Vault.open(place, keys.key_file(key))
        if what == "rotate":
            trees.rotate(mine, nothing)
        elif what == "rekey":
            mine.rekey()
        else:
            seal(mine, source, "more")

    for step in range(1000):
        shutil.copytree(vault.path.local, place)
        killed = killed_at(step, action)
        left = Vault.open(place, keys.key_file(key))
        assert left.find("object").manifest.object_version == 1
        for stored in left.newest():
            trees.verify(stored, nothing)
        action()  # and what was begun can be finished
        if what != "seal":
            assert not Vault.open(place, keys.key_file(key)).header.older
            assert len(list(Vault.open(place, keys.key_file(key)).copies([]))) == 1
        shutil.rmtree(place)
        if not killed:
            break
    assert 10 < step < 999


@pytest.mark.parametrize("change", ["written", "exchanged", "removed", "added", "another"])
@pytest.mark.threat("P17")
def test_a_source_that_changes_while_it_is_sealed(
    change: str, vault: Vault, tmp_path: Path
) -> None:
    """No version mixes two states of a source."""
    source = tmp_path / "source"
    source.mkdir()
    for name in "ab":
        (source / name).write_bytes(bytes(3 << 20))
    changed: list[bool] = []

    def progress(count: int) -> None:
        if changed:
            return
        changed.append(True)
        if change == "written":
            with (source / "a").open("r+b") as file:
                file.write(b"other")
        elif change == "exchanged":
            (tmp_path / "other").write_bytes(bytes(3 << 20))
            (tmp_path / "other").rename(source / "a")
        elif change == "removed":
            (source / "a").unlink()
        elif change == "added":
            (source / "c").write_bytes(b"c")
        else:
            (source / "b").unlink()

    code = "vault.bad_source" if change == "another" else "vault.source_changed"
    with pytest.raises(
        SealringError, match=r"while it was sealed|cannot be read", check=coded(code)
    ):
        trees.seal_path(vault, source, "data", None, progress)
    with pytest.raises(NoSuchObject):
        vault.find("data")
    if change != "another":
        assert trees.seal_path(vault, source, "data", None, lambda _: None) == 1
