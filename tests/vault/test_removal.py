"""`sealring vault rm`: what is removed is gone, and who puts it back is seen."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sealring.cli import app
from sealring.errors import ConfigurationError, NoSuchObject, RolledBack
from sealring.vault import Vault, keys, trees


def seal(vault: Vault, content: str, name: str = "data") -> int:
    source = vault.path.parent / "source"
    source.local.write_text(content)
    return trees.seal_path(vault, source.local, name, None, lambda _: None)


@pytest.mark.threat("V11")
def test_an_object_is_gone_and_can_be_sealed_anew(vault: Vault, key: Path) -> None:
    for content in ("one", "two"):
        seal(vault, content)
    seal(vault, "other", "other")
    before = vault.path.local.with_name("before")
    shutil.copytree((vault.path / "objects").local, before)
    assert vault.remove("data") == 2
    with pytest.raises(NoSuchObject, match="'data' was removed"):
        vault.find("data")
    assert [one.manifest.name for one in vault.newest()] == ["other"]
    assert trees.rotate(vault, lambda _: None).versions == 2
    # Who puts the versions back is not believed.
    shutil.rmtree((vault.path / "objects").local)
    shutil.copytree(before, vault.path.local / "objects")
    with pytest.raises(RolledBack):
        Vault.open(vault.path, keys.key_file(key)).find("data")


def test_a_removed_name_goes_on_with_the_next_number(vault: Vault) -> None:
    seal(vault, "one")
    vault.remove("data")
    assert seal(vault, "again") == 3
    assert vault.find("data").manifest.object_version == 3


def test_one_version_that_is_not_the_newest(vault: Vault) -> None:
    for content in ("one", "two", "three"):
        seal(vault, content)
    vault.remove("data", 2)
    assert vault.find("data").manifest.object_version == 3
    with pytest.raises(NoSuchObject):
        vault.find("data", 2)
    with pytest.raises(NoSuchObject):
        vault.remove("data", 2)
    with pytest.raises(ConfigurationError, match="is the newest of 'data'"):
        vault.remove("data", 3)
    with pytest.raises(NoSuchObject):
        vault.remove("nothing")


def test_an_object_that_does_not_open_is_removed(vault: Vault) -> None:
    seal(vault, "one")
    manifest = vault.find("data").copy.folder / "manifest"
    manifest.local.write_bytes(b"junk")
    assert vault.remove("data") == 1
    assert list(vault.newest()) == []


def test_the_command(vault: Vault, key: Path) -> None:
    seal(vault, "one")
    run = CliRunner().invoke
    options = [str(vault.path), "data", "--key", str(key)]
    assert run(app, ["vault", "rm", *options], input="n\n").exit_code == 1
    assert vault.find("data")
    assert run(app, ["vault", "rm", *options, "--yes"]).exit_code == 0
    listed = run(app, ["vault", "ls", str(vault.path), "--key", str(key), "--json"])
    assert json.loads(listed.stdout)["objects"] == []


def test_what_is_asked_is_not_among_the_json(vault: Vault, key: Path) -> None:
    """As a process: a test's runner shows answers on stdout, too."""
    seal(vault, "one")
    command = ["vault", "rm", str(vault.path), "data", "--key", str(key), "--json"]
    done = subprocess.run(
        [Path(sys.executable).parent / "sealring", *command],
        input="y\n", capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "It cannot be brought back" in done.stderr
    assert json.loads(done.stdout) == {"name": "data", "version": None, "removed": 1}


def test_ls_lists_the_rest_when_one_object_does_not_open(vault: Vault, key: Path) -> None:
    for name in ("bad", "good"):
        seal(vault, name, name)
    (vault.find("bad").copy.folder / "manifest").local.write_bytes(b"junk")
    listed = CliRunner().invoke(app, ["vault", "ls", str(vault.path), "--key", str(key), "--json"])
    found = json.loads(listed.stdout)
    assert listed.exit_code == 2
    assert [one["name"] for one in found["objects"]] == ["good"]
    assert [one["error"] for one in found["problems"]] == ["vault.truncated_file"]


def test_a_public_key_that_is_written_in_another_way_is_the_same_holder(
    vault: Vault, tmp_path: Path
) -> None:
    public = keys.make_identity(tmp_path / "alice").public
    vault.grant("alice", keys.PublicKey(public))
    # The last letter has bits that no byte holds.
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    end = len(public.rstrip("="))
    last = letters[letters.index(public[end - 1]) ^ 1]
    other = public[: end - 1] + last + public[end:]
    assert other != public
    with pytest.raises(ConfigurationError, match="has the grant 'alice' already"):
        vault.grant("alice again", keys.PublicKey(other))


def test_a_version_without_its_parts_does_not_count_as_one_that_is_kept(vault: Vault) -> None:
    for content in ("one", "two", "three"):
        seal(vault, content)
    two = vault.find("data", 2)
    (two.copy.folder / two.manifest.parts[0].name).local.unlink()
    assert [int(one.name) for one in vault.surplus("data", 3, 0)] == [1]
    assert vault.surplus("data", 3, 1) == []
