"""`sealring vault` as a person types it: each verb, and bad input to each."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from sealring.cli import app
from sealring.errors import (
    BadCredential,
    ConfigurationError,
    DiskFull,
    NotAVault,
    SealringError,
    VaultError,
)
from sealring.vault import Vault, files, keys
from tests.codes import coded


class Shell:
    def __init__(self, folder: Path, key: str | None = None) -> None:
        self.folder = folder
        self.key = key
        """What opens the vault, unless a command names something else."""
        self.status = 0

    def __call__(self, *arguments: str) -> str:
        commands: Any = get_command(app)
        keyed = {name: {"key": self.key} for name in commands.commands["vault"].commands}
        result = CliRunner().invoke(app, ["vault", *arguments], default_map={"vault": keyed})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        self.status = result.exit_code
        return result.output


@pytest.fixture
def sh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path, key="k")
    shell("init", "v")
    (tmp_path / "f").write_bytes(b"content")
    return shell


def test_programs_read_json(sh: Shell) -> None:
    assert json.loads(sh("seal", "v", "f", "--name", "n", "--json")) == {"name": "n", "version": 1}
    listed = json.loads(sh("ls", "v", "--json"))
    (row,) = listed["objects"]
    assert row == {"name": "n", "version": 1, "kind": "files", "parts": 1, "bytes": 7}
    assert listed["grants"] == [{"name": "owner", "kind": "file"}]
    (row,) = json.loads(sh("verify", "v", "--json"))["objects"]
    assert row["error"] is None


def test_verify_names_what_is_not_authentic(sh: Shell) -> None:
    sh("seal", "v", "f")
    (part,) = (sh.folder / "v").rglob("00000000")
    content = part.read_bytes()
    part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (row,) = json.loads(sh("verify", "v", "--json"))["objects"]
    assert (row["error"], sh.status) == ("vault.tampered_chunk", 2)
    said = sh("verify", "v")
    assert "part 00000000 of 'f' version 1: chunk 0 of 1" in said
    assert "0 of 1 versions are intact: the key is right, and what is named above was" in said
    assert sh.status == 2


@pytest.mark.threat("V10")
def test_verify_tells_changed_bytes_from_a_wrong_key(sh: Shell) -> None:
    """The manifest lists a part's commitment to its key, so a changed salt is no wrong key."""
    sh("seal", "v", "f")
    tampered, foreign = "vault.tampered_chunk", "vault.foreign_part"
    expected = {
        "00000000": {
            0: "vault.tampered_chunk",
            23: "vault.tampered_chunk",
            24: "vault.foreign_part",
        },
        "manifest": {0: foreign, 55: foreign, 56: tampered},
        "key.json": {-5: foreign},
    }
    for name, flips in expected.items():
        (file,) = (sh.folder / "v").rglob(name)
        good = file.read_bytes()
        for at, error in flips.items():
            content = bytearray(good)
            # In key.json a hexadecimal digit: 0 to 1, 1 to 0, a to b.
            content[at] = ord("0") if content[at] == ord("1") else ord("1")
            file.write_bytes(content)
            (row,) = json.loads(sh("verify", "v", "--json"))["objects"]
            assert row["error"] == error, (name, at)
            assert "was changed" in row["message"]
            assert "Restore" in row["message"]
        file.write_bytes(good)
    sh("init", "w", "--key", "another")
    with pytest.raises(
        VaultError, match="is not open to this key file", check=coded("vault.not_granted")
    ):
        sh("verify", "v", "--key", "another")


def test_a_broker_s_data_key_as_a_grant(sh: Shell) -> None:
    (sh.folder / "data").write_bytes(b"d" * 16 + b"e" * 16)
    with pytest.raises(BadCredential, match="chmod 600", check=coded("configuration.bad_key_file")):
        sh("grant", "v", "--name", "w", "--to-broker", "a/b/c", "--data-key", "data")
    (sh.folder / "data").chmod(0o600)
    sh("grant", "v", "--name", "w", "--to-broker", "a/b/c", "--data-key", "data")
    assert {"name": "w", "kind": "broker"} in json.loads(sh("ls", "v", "--json"))["grants"]


def test_a_second_key_file_opens_the_vault_until_it_is_revoked(sh: Shell) -> None:
    sh("seal", "v", "f")
    sh("grant", "v", "--name", "second", "--to-key", "k2")
    assert (sh.folder / "k2").stat().st_mode & 0o777 == 0o600
    sh("open", "v", "f", "--out", "o", "--key", "k2")
    assert (sh.folder / "o").read_bytes() == b"content"
    assert "stay known" in sh("revoke", "v", "second")
    with pytest.raises(VaultError, check=coded("vault.not_granted")):
        sh("ls", "v", "--key", "k2")


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("init v", "vault.output_exists", "is there already"),
        ("init missing/v", "configuration", "cannot be made"),
        ("seal v nothing", "configuration", "does not exist"),
        ("seal v link", "vault.unsafe_path", "is a symlink"),
        ("seal other f", "vault.not_a_vault", "there is no vault"),
        ("seal v f --key exposed", "configuration.bad_key_file", "chmod 600"),
        ("seal v f --name ''", "configuration", "1 to 1000"),
        ("open v nothing --out o", "vault.no_such_object", "is not in v"),
        ("open v f --out f", "vault.output_exists", "will not be overwritten"),
        ("open v f --out link", "vault.output_exists", "will not be overwritten"),
        ("open v f --out missing/o", "configuration", "cannot be written"),
        ("open v f --out o --version 7", "vault.no_such_object", "it has 1"),
        ("open v f --out o --format onnx", "configuration", "torch or safetensors"),
        ("open v f --out o --only model", "configuration", "is no checkpoint"),
        ("open v f --out o --key k9", "configuration.bad_key_file", "cannot be read"),
        ("open v f --out o --identity k", "configuration.bad_key_file", "vault identity"),
        ("ls v nothing", "vault.no_such_object", "is not in v"),
        ("ls v --version 1", "configuration", "name the object too"),
        ("ls v --key other.key", "vault.not_granted", "not open to this key file"),
        ("verify v nothing", "vault.no_such_object", "is not in v"),
        ("verify v --version 1", "configuration", "name the object too"),
        ("verify v f --version 7", "vault.no_such_object", "it has 1"),
        ("grant v --name x", "configuration", "name one of"),
        ("grant v --name x --to-key k3 --data-key k", "configuration", "name the resource too"),
        ("grant v --name x --to-person x", "configuration", "no person's public key"),
        ("grant v --name x --to-broker a/b/c", "configuration", "--data-key"),
        ("grant v --name owner --to-key k3", "configuration", "has a grant named"),
        ("revoke v nothing", "configuration", "no grant named"),
        ("revoke v owner", "configuration", "last key"),
        ("rotate other --keys-only", "vault.not_a_vault", "there is no vault"),
        ("rotate other", "vault.not_a_vault", "there is no vault"),
        ("identity exposed", "configuration.bad_key_file", "chmod 600"),
    ],
)
def test_bad_input_is_refused_by_name(line: str, code: str, words: str, sh: Shell) -> None:
    sh("seal", "v", "f")
    (sh.folder / "link").symlink_to("/etc/passwd")
    (sh.folder / "exposed").write_text("sealring-key-1 " + "ab" * 32)
    (sh.folder / "exposed").chmod(0o644)
    sh("init", "v2", "--key", "other.key")
    before = sorted(path.name for path in sh.folder.iterdir() if path.name != "k3")
    with pytest.raises(SealringError, match=words, check=coded(code)):
        sh(*("" if word == "''" else word for word in line.split()))
    after = sorted(path.name for path in sh.folder.iterdir() if path.name != "k3")
    assert before == after


def test_every_version_of_one_object_is_verified(sh: Shell) -> None:
    for name in ("f", "f", "other"):
        sh("seal", "v", "f", "--name", name)
    first, second, other = sorted(
        sh.folder.glob("v/objects/*/*/*/00000000"), key=lambda path: path.stat().st_mtime_ns
    )

    def verified() -> list[tuple[int | None, str | None]]:
        rows = json.loads(sh("verify", "v", "f", "--json"))["objects"]
        return [(row["version"], row["error"]) for row in rows]

    assert (verified(), sh.status) == ([(1, None), (2, None)], 0)
    for path in (first, other):
        path.write_bytes(path.read_bytes()[:-1])
    assert (verified(), sh.status) == ([(1, "vault.truncated_file"), (2, None)], 2)
    sh("verify", "v", "f", "--version", "2")
    assert sh.status == 0
    shutil.rmtree(second.parents[1])
    assert (verified(), sh.status) == (
        [(None, "vault.rolled_back"), (1, "vault.truncated_file")],
        2,
    )


def test_without_a_key_the_error_says_what_to_name(sh: Shell) -> None:
    sh.key = None
    with pytest.raises(ConfigurationError, match="--key FILE"):
        sh("ls", "v")


def test_verify_opens_older_versions_too(sh: Shell) -> None:
    sh("seal", "v", "f")
    (part,) = (sh.folder / "v").rglob("00000000")
    sh("seal", "v", "f")
    part.write_bytes(part.read_bytes()[:-1])
    rows = json.loads(sh("verify", "v", "--json"))["objects"]
    assert [(row["version"], row["error"]) for row in rows] == [
        (1, "vault.truncated_file"),
        (2, None),
    ]
    assert sh.status == 2


def test_the_id_that_a_vault_must_have(sh: Shell) -> None:
    known = json.loads(sh("ls", "v", "--json"))["vault"]
    sh("seal", "v", "f", "--vault-id", known)
    with pytest.raises(VaultError, match=f"holds the vault {known}", check=coded("vault.foreign")):
        sh("seal", "v", "f", "--vault-id", "0" * 32)


def test_grants_that_stay_are_presented(sh: Shell) -> None:
    for name in ("two", "three"):
        sh("grant", "v", "--name", name, "--to-key", f"{name}.key")
    data = sh.folder / "data.key"
    data.write_bytes(b"d" * 32)
    data.chmod(0o600)
    sh("grant", "v", "--name", "job", "--to-broker", "a/b/c", "--data-key", "data.key")
    told = sh(
        "rotate", "v", "--keys-only", "--also-key", "two.key", "--also-data-key", "a/b/c=data.key"
    )
    assert "three gets no new key of v" in " ".join(told.split())
    assert "two gets no" not in told
    grants = json.loads(sh("ls", "v", "--json"))["grants"]
    assert [one["name"] for one in grants] == ["owner", "two", "job"]
    with pytest.raises(ConfigurationError, match="REPOSITORY/TYPE/TAG=FILE"):
        sh("rotate", "v", "--also-data-key", "a/b/c")


def test_people_stay_granted_by_their_public_keys(sh: Shell) -> None:
    for name in ("bob", "carol"):
        Path(f"{name}.public").write_text(sh("identity", name))
        sh("grant", "v", "--name", name, "--to-person", f"{name}.public")
    told = sh("rotate", "v", "--keys-only", "--also-person", "bob.public")
    assert "carol gets no new key of v" in told
    assert "bob" not in told
    told = sh("rotate", "v", "--also-person", Path("bob.public").read_text().strip())
    assert "gets no new key" not in told
    assert "bob (person)" in sh("ls", "v")


@pytest.mark.parametrize(
    "verb", [["revoke", "v", "two"], ["rotate", "v", "--keys-only"], ["rotate", "v"]]
)
@pytest.mark.threat("V19")
def test_dropped_grants_are_named_also_if_an_object_does_not_open(
    verb: list[str], sh: Shell
) -> None:
    sh("seal", "v", "f")
    for name in ("two", "three"):
        sh("grant", "v", "--name", name, "--to-key", f"{name}.key")
    (damaged,) = (sh.folder / "v").rglob("key.json")
    damaged.write_text("damaged")
    result = CliRunner().invoke(app, ["vault", *verb, "--key", "k"])
    assert type(result.exception) is NotAVault
    assert "Restore them from a copy" in str(result.exception)
    assert "three gets no new key of v" in result.output


@pytest.mark.parametrize("name", ["x[/red]", "x[red].bin", "[bold]", "a\\[b"])
def test_names_are_shown_as_they_are(name: str, sh: Shell) -> None:
    assert f"{name} is sealed" in sh("seal", "v", "f", "--name", name)
    assert name in sh("ls", "v")
    sh("open", "v", name, "--out", "out")
    assert Path("out").read_bytes() == b"content"


def test_a_refused_init_leaves_no_key(sh: Shell) -> None:
    with pytest.raises(
        VaultError, match="choose another place", check=coded("vault.output_exists")
    ):
        sh("init", "v", "--key", "another")
    assert not (sh.folder / "another").exists()
    with pytest.raises(VaultError, check=coded("vault.output_exists")):
        sh("init", "v", "--key", "k")
    assert (sh.folder / "k").exists()  # it was there before
    with pytest.raises(ConfigurationError, match="cannot be made"):
        sh("init", "data/no/folder", "--key", "another")
    assert not (sh.folder / "another").exists()


def test_a_full_disk_is_named(sh: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in writing an open file has no path of its own."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fails(descriptor: int) -> None:
        raise full

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(DiskFull, match=r"/manifest cannot be written: No space left on device\. "):
        files.write_file(sh.folder / "manifest", b"content")


def test_a_command_in_a_pipe_writes_no_empty_lines(sh: Shell) -> None:
    result = CliRunner().invoke(app, ["vault", "seal", "v", "f"])
    assert result.stderr == ""


@pytest.mark.parametrize("kind", ["\x1b[2J", "k" * 101])
@pytest.mark.threat("V38")
def test_a_kind_that_cannot_be_printed(kind: str, sh: Shell) -> None:
    """Of a vault that somebody else made; it reached the terminal as it was."""
    vault = Vault.open("v", keys.key_file(Path("k")))
    vault.commit(vault.new_version("n"), kind, "n", [], "{}")
    (problem,) = json.loads(sh("ls", "v", "--json"))["problems"]
    assert problem["error"] == "vault.not_a_vault"
    assert "a kind that cannot be printed" in problem["message"]


def test_a_kind_is_no_markup(sh: Shell) -> None:
    """`ls` ended with an error of the library that prints the table."""
    vault = Vault.open("v", keys.key_file(Path("k")))
    vault.commit(vault.new_version("n"), "[/x]", "n", [], "{}")
    assert "[/x]" in sh("ls", "v")
