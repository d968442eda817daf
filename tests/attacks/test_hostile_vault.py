"""A vault in the hands of an adversary: of the disk's owner, or of one admitted worker."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from sealring import _native
from sealring.errors import ForeignPart, NotAVault, NotGranted, RolledBack
from sealring.vault import CheckpointReader, CheckpointWriter, Vault, keys, signing, trees
from sealring.vault import header as headers
from sealring.vault.keys import Person
from tests.vault.crashes import killed_at
from tests.workers import SECRET

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    monkeypatch.setenv("SEALRING_JOB", "tests")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    keys.make_key_file(tmp_path / "vault.key")
    return tmp_path / "vault.key"


@pytest.fixture
def vault(tmp_path: Path, key: Path) -> Vault:
    return Vault.create(tmp_path / "vault", keys.key_file(key), "owner")


def seal(vault: Vault, name: str) -> None:
    trees.seal_path(vault, Path(__file__), name, None, lambda _: None)


def test_an_object_that_is_removed_whole(vault: Vault) -> None:
    """Its directory is gone: a list of what is there would not miss it."""
    for name in ("one", "two"):
        seal(vault, name)
    shutil.rmtree(vault.find("one").copy.folder.parents[1])
    with pytest.raises(RolledBack, match="has none"):
        list(vault.newest())
    problems: list[Any] = []
    assert [one.manifest.name for one in vault.newest(problems)] == ["two"]
    assert [type(one) for one in problems] == [RolledBack]


@pytest.mark.parametrize("file", ["vault.json", "key.json", "ledger.json"])
def test_json_nested_too_deeply(file: str, vault: Vault, key: Path) -> None:
    seal(vault, "object")
    (path,) = vault.path.rglob(file)
    path.write_bytes(b"[" * 200_000)
    with pytest.raises(NotAVault):
        Vault.open(vault.path, keys.key_file(key)).find("object")


def test_a_persons_grant_with_a_key_that_is_none(vault: Vault, tmp_path: Path) -> None:
    """Anyone can wrap anything for a public key."""
    person = keys.make_identity(tmp_path / "me")
    for size in (1, 31, 33):
        short = _native.Secret.random(size)
        grant = keys.grant_to_person("me", person.public, vault.header.vault, short)
        forged = headers.Header(**{**_fields(vault.header), "grants": [grant]})
        with pytest.raises(NotGranted):
            headers.open_header(forged, person, "the vault")


def test_a_persons_grant_of_random_bytes(vault: Vault, tmp_path: Path) -> None:
    person: Person = keys.make_identity(tmp_path / "me")
    for size in (0, 1, 16, 1119, 1120, 1121, 1168, 5000):
        grant = keys.Grant("me", "person", os.urandom(size).hex(), person.public, "")
        assert person.unwrap(vault.header.vault, grant) is None


def _fields(header: headers.Header) -> dict[str, Any]:
    return {name: getattr(header, name) for name in header.__dataclass_fields__}


def test_a_revocation_that_is_killed_never_shares_the_next_key(
    vault: Vault, key: Path, tmp_path: Path
) -> None:
    """The grant is gone only in a header that has a new key: else it would never be replaced."""
    keys.make_key_file(tmp_path / "second")
    second = keys.key_file(tmp_path / "second")
    vault.grant(second.grant("second", vault.header.vault, vault.ring.key))
    seal(vault, "object")
    place = tmp_path / "copy"
    steps = 0
    while True:
        shutil.copytree(vault.path, place)
        killed = killed_at(steps, lambda: Vault.open(place, keys.key_file(key)).revoke("second"))
        left = Vault.open(place, keys.key_file(key))
        gone = all(grant.name != "second" for grant in left.header.grants)
        assert gone == (left.header.key == 2)
        trees.verify(left.find("object"), lambda _: None)
        shutil.rmtree(place)
        if not killed:
            break
        steps += 1
    assert gone
    assert steps > 5


def test_the_helper_process_finds_no_secret_in_its_environment(
    vault: Vault, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The environment of a worker has the job's secret: with it a process is any rank."""
    import subprocess

    monkeypatch.setenv("SEALRING_VAULT_KEY", "somewhere")
    seen: list[dict[str, str]] = []
    real: Any = subprocess.Popen

    def spy(*arguments: Any, env: dict[str, str], **others: Any) -> Any:
        seen.append(env)
        return real(*arguments, env=env, **others)

    monkeypatch.setattr("sealring.vault.staging.subprocess.Popen", spy)
    dcp.save({"x": torch.ones(3)}, storage_writer=CheckpointWriter(vault, "run", helper=True))
    (environment,) = seen
    assert not [name for name in environment if name.startswith("SEALRING_")]


# ---- one admitted worker that lies ---------------------------------------------------------------


def resigned(vault: Vault, change: Callable[[dict[str, Any]], None]) -> None:
    """The newest checkpoint with a contribution that its rank signed after a change."""
    stored = vault.find("run")
    content = json.loads(stored.manifest.content)
    credentials = signing.credentials_of(0, 1)
    document = json.loads(content["contributions"][0]["statement"])
    change(document)
    signed = signing.sign(credentials, 1, document)
    whole = json.loads(content["whole"]["statement"])
    from sealring.vault.checkpoint_writer import digest

    whole["contributions"] = [digest(signed)]
    content = {
        "whole": signing.as_document(signing.sign(credentials, 1, whole)),
        "contributions": [signing.as_document(signed)],
    }
    manifest = stored.manifest
    stored.copy.commit("checkpoint", "run", manifest.parts, content, manifest.id)


def move_out(document: dict[str, Any]) -> None:
    document["items"][0][3] = 1 << 40


def other_part(document: dict[str, Any]) -> None:
    document["items"][0][2] = "rank-00007"


def twice(document: dict[str, Any]) -> None:
    document["items"].append(document["items"][0])


def longer(document: dict[str, Any]) -> None:
    document["items"][0][4] += 4


def negative(document: dict[str, Any]) -> None:
    document["items"][0][3] = -4


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (move_out, ForeignPart),
        (other_part, ForeignPart),
        (twice, ForeignPart),
        (longer, ForeignPart),
        (negative, ForeignPart),
        (lambda document: document.pop("items"), NotAVault),
        (lambda document: document.update(parts=[{"name": 1}]), NotAVault),
        (lambda document: document.update(items=[[1]]), NotAVault),
    ],
)
def test_a_rank_that_signs_for_what_it_did_not_write(
    change: Callable[[dict[str, Any]], None], error: type[Exception], vault: Vault
) -> None:
    saved = {"a": torch.ones(10), "b": torch.zeros(10)}
    dcp.save(saved, storage_writer=CheckpointWriter(vault, "run"))
    resigned(vault, change)
    into = {"a": torch.full((10,), 5.0), "b": torch.full((10,), 5.0)}
    with pytest.raises(CheckpointException) as raised:
        dcp.load(into, storage_reader=CheckpointReader(vault, "run"))
    assert {type(one[0]) for one in raised.value.failures.values()} == {error}
    assert bool((into["a"] == 5).all())
