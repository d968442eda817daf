"""Attacks on a vault by the owner of its disk and by one admitted worker."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from sealring import _native
from sealring.errors import (
    ConfigurationError,
    ForeignPart,
    NotAVault,
    RolledBack,
    TamperedChunk,
    TruncatedFile,
    VaultError,
)
from sealring.vault import CheckpointReader, CheckpointWriter, Vault, keys, signing, trees
from sealring.vault import header as headers
from sealring.vault.checkpoint_form import load_entry
from sealring.vault.digests import Hash, computed
from sealring.vault.keys import Person
from tests.codes import coded
from tests.crashes import killed_at
from tests.vault import slow
from tests.workers import SECRET

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    monkeypatch.setenv("SEALRING_JOB", "tests")


def seal(vault: Vault, name: str) -> None:
    trees.seal_path(vault, Path(__file__), name, None, lambda _: None)


@pytest.mark.threat("V11")
def test_an_object_that_is_removed_whole(vault: Vault) -> None:
    """The object's directory is gone, so a plain listing of the disk would not miss it."""
    for name in ("one", "two"):
        seal(vault, name)
    shutil.rmtree(vault.find("one").copy.folder.local.parents[1])
    with pytest.raises(RolledBack, match="has none"):
        list(vault.newest())
    problems: list[Any] = []
    assert [one.manifest.name for one in vault.newest(problems)] == ["two"]
    assert [type(one) for one in problems] == [RolledBack]


@pytest.mark.parametrize("file", ["vault.json", "key.json", "ledger.json"])
@pytest.mark.threat("V42")
def test_json_nested_too_deeply(file: str, vault: Vault, key: Path) -> None:
    seal(vault, "object")
    (path,) = vault.path.local.rglob(file)
    path.write_bytes(b"[" * 200_000)
    with pytest.raises(NotAVault):
        Vault.open(vault.path, keys.key_file(key)).find("object")


def test_a_list_of_files_nested_too_deeply(vault: Vault, tmp_path: Path) -> None:
    """A holder of the key may write such a list, and a person may open an attacker's vault."""
    seal(vault, "object")
    stored = vault.find("object")
    stored.copy.commit("files", "object", stored.manifest.parts, "[" * 200_000)
    hostile = dataclasses.replace(stored, manifest=stored.copy.manifest())
    with pytest.raises(NotAVault, match="nested too deeply"):
        trees.open_object(hostile, tmp_path / "out", lambda _: None)


@pytest.mark.threat("V42")
def test_a_persons_grant_with_a_key_that_is_none(vault: Vault, tmp_path: Path) -> None:
    """Anyone can wrap any bytes for a public key, so a grant's content is not trusted."""
    person = keys.make_identity(tmp_path / "me")
    for size in (1, 31, 33):
        short = _native.Secret.random(size)
        grant = keys.PublicKey(person.public).grant("me", vault.header.vault, 1, short)
        forged = headers.Header(**{**_fields(vault.header), "grants": [grant]})
        with pytest.raises(VaultError, check=coded("vault.not_granted")):
            headers.open_header(forged, person, "the vault")


@pytest.mark.threat("V42")
def test_a_persons_grant_of_random_bytes(vault: Vault, tmp_path: Path) -> None:
    person: Person = keys.make_identity(tmp_path / "me")
    for size in (0, 1, 16, 1119, 1120, 1121, 1168, 5000):
        grant = keys.Grant("me", "person", os.urandom(size).hex(), person.public, "")
        assert person.unwrap(vault.header.vault, 1, grant) is None


def _fields(header: headers.Header) -> dict[str, Any]:
    return {name: getattr(header, name) for name in header.__dataclass_fields__}


@pytest.mark.threat("V26")
def test_a_revocation_that_is_killed_never_shares_the_next_key(
    vault: Vault, key: Path, tmp_path: Path
) -> None:
    """A header without the grant has a new key, which would otherwise never be made."""
    keys.make_key_file(tmp_path / "second")
    second = keys.key_file(tmp_path / "second")
    vault.grant("second", second)
    seal(vault, "object")
    place = tmp_path / "copy"
    steps = 0
    while True:
        shutil.copytree(vault.path.local, place)
        killed = killed_at(steps, lambda: Vault.open(place, keys.key_file(key)).revoke("second"))
        left = Vault.open(place, keys.key_file(key))
        gone = all(grant.name != "second" for grant in left.header.grants)
        assert gone == (left.header.key == 2)
        trees.verify(left.find("object"), lambda _: None)
        if gone:
            advice = "sealring vault rotate --keys-only" if left.header.older else "it has owner$"
            with pytest.raises(ConfigurationError, match=advice):
                left.revoke("second")
        shutil.rmtree(place)
        if not killed:
            break
        steps += 1
    assert gone
    assert steps > 5


@pytest.mark.threat("P7")
def test_the_helper_process_finds_no_secret_in_its_environment(
    vault: Vault, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A worker's environment has the job secret, with which any process can act as any rank."""
    import subprocess

    monkeypatch.setenv("SEALRING_VAULT_LEDGER", str(tmp_path))
    seen: list[dict[str, str]] = []
    real: Any = subprocess.Popen

    def spy(*arguments: Any, env: dict[str, str], **others: Any) -> Any:
        seen.append(env)
        return real(*arguments, env=env, **others)

    monkeypatch.setattr("subprocess.Popen", spy)
    dcp.save({"x": torch.ones(3)}, storage_writer=CheckpointWriter(vault, "run", helper=True))
    (environment,) = seen
    assert not [name for name in environment if name.startswith("SEALRING_")]


# ---- one admitted worker that lies ---------------------------------------------------------------


def resigned(vault: Vault, change: Callable[[dict[str, Any]], None]) -> None:
    """Replaces the newest checkpoint's contribution by one that its rank signed after `change`."""
    stored = vault.find("run")
    content = json.loads(stored.manifest.content)
    credentials = signing.credentials_of(0, 1)
    document = json.loads(content["contributions"][0]["statement"])
    change(document)
    signed = signing.sign(credentials, 1, document)
    content["contributions"] = [asdict(signed)]
    manifest = stored.manifest
    vault.commit(stored.copy, "checkpoint", "run", manifest.parts, json.dumps(content))


def move_out(document: dict[str, Any]) -> None:
    document["items"][0]["start"] = 1 << 40


def twice(document: dict[str, Any]) -> None:
    document["items"].append(document["items"][0])


def longer(document: dict[str, Any]) -> None:
    document["items"][0]["length"] += 4


def negative(document: dict[str, Any]) -> None:
    document["items"][0]["start"] = -4


def of_another_version(document: dict[str, Any]) -> None:
    document["checkpoint"]["version"] = 77


def other_length(document: dict[str, Any]) -> None:
    document["length"] += 1


def other_digests(document: dict[str, Any]) -> None:
    document["digests"] = "00" * 32


def other_hash(document: dict[str, Any]) -> None:
    document["hash"] = "sha256" if document["hash"] == "blake3" else "blake3"


def half(document: dict[str, Any]) -> None:
    """Leaves half of the tensor out of every part."""
    document["items"][0]["size"] = [20]


def out_of_the_tensor(document: dict[str, Any]) -> None:
    document["items"][0]["offsets"] = [1]


def overlapping(document: dict[str, Any]) -> None:
    first = document["items"][0]
    first |= {"size": [15]}
    document["items"].append(first | {"offsets": [5]})


def other_type(document: dict[str, Any]) -> None:
    document["items"][0]["dtype"] = "float64"


def no_type(document: dict[str, Any]) -> None:
    document["items"][0]["dtype"] = "load"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (move_out, ForeignPart),
        (twice, ForeignPart),
        (longer, ForeignPart),
        (negative, NotAVault),
        (of_another_version, ForeignPart),
        (other_length, ForeignPart),
        (other_digests, ForeignPart),
        (other_hash, ForeignPart),
        (lambda document: document.update(hash="md5"), NotAVault),
        (lambda document: document.pop("hash"), NotAVault),
        (half, ForeignPart),
        (out_of_the_tensor, ForeignPart),
        (overlapping, ForeignPart),
        (other_type, ForeignPart),
        (no_type, NotAVault),
        (lambda document: document.pop("items"), NotAVault),
        (lambda document: document.update(length=1.0), NotAVault),
        (lambda document: document.update(items=[[1]]), NotAVault),
    ],
)
@pytest.mark.parametrize("when", ["before the commit", "after the commit"])
@pytest.mark.threat("P3")
def test_a_rank_that_signs_for_what_it_did_not_write(
    when: str, change: Callable[[dict[str, Any]], None], error: type[Exception], vault: Vault,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The coordinator refuses to commit it; if it were committed, no rank would load it."""
    saved = {"a": torch.ones(10), "b": torch.zeros(10)}
    dcp.save(saved, storage_writer=CheckpointWriter(vault, "run"))
    if when == "before the commit":
        real = signing.sign

        def lie(credentials: Any, world: int, document: dict[str, Any]) -> signing.Signed:
            if "items" in document:
                change(document)
            return real(credentials, world, document)

        monkeypatch.setattr(signing, "sign", lie)
        with pytest.raises(CheckpointException) as refused:
            dcp.save(saved, storage_writer=CheckpointWriter(vault, "run", keep=1))
        assert {type(one[0]) for one in refused.value.failures.values()} == {error}
        into = {"a": torch.zeros(10), "b": torch.ones(10)}
        dcp.load(into, storage_reader=CheckpointReader(vault, "run"))
        assert bool((into["a"] == 1).all())  # the checkpoint before was not removed
        return
    resigned(vault, change)
    into = {"a": torch.full((10,), 5.0), "b": torch.full((10,), 5.0)}
    with pytest.raises(CheckpointException) as raised:
        dcp.load(into, storage_reader=CheckpointReader(vault, "run"))
    assert {type(one[0]) for one in raised.value.failures.values()} == {error}
    assert bool((into["a"] == 5).all())


# ---- a holder of the vault's key that is no worker -----------------------------------------------


@pytest.mark.parametrize("hash", ["sha256", "blake3"])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.threat("P2")
def test_bytes_that_a_holder_of_the_key_changes(rotated: bool, hash: Hash, vault: Vault) -> None:
    """The same salt gives the same commitment; only the signed digests show a change."""
    writer = CheckpointWriter(vault, "run", hash=hash)
    dcp.save({"w": torch.arange(8.0)}, storage_writer=writer)
    if rotated:
        trees.rotate(vault, lambda _: None)
    stored = vault.find("run")
    place, name = stored.copy.place, "rank-00000"
    path = stored.copy.folder / name
    key, context = bytes(place.part_key(name)), place.context(name)
    changed = torch.full((8,), 666.0).numpy().tobytes()
    salt = path.local.read_bytes()[:24]
    path.local.write_bytes(slow.seal(key, place.suite, salt, context, changed))
    into = {"w": torch.zeros(8)}
    with pytest.raises(CheckpointException) as raised:
        dcp.load(into, storage_reader=CheckpointReader(vault, "run"))
    ((problem, _),) = raised.value.failures.values()
    assert type(problem) is TamperedChunk
    assert "part rank-00000 of 'run' version 1" in str(problem)
    assert "other bytes than its writer signed" in str(problem)
    assert bool((into["w"] == 0).all())


def put_list(vault: Vault, digests: bytes) -> None:
    """Seals other digests under the key and the salt of the newest checkpoint's list."""
    copy = vault.find("run").copy
    name = "rank-00000.digests"
    path = (copy.folder / name).local
    key, context = bytes(copy.place.part_key(name)), copy.place.context(name)
    path.write_bytes(slow.seal(key, copy.place.suite, path.read_bytes()[:24], context, digests))


def refusal_of_load(vault: Vault) -> BaseException:
    into = {"w": torch.zeros(8)}
    with pytest.raises(CheckpointException) as raised:
        dcp.load(into, storage_reader=CheckpointReader(vault, "run"))
    ((problem, _),) = raised.value.failures.values()
    assert bool((into["w"] == 0).all())
    return problem


@pytest.mark.parametrize("hash", ["sha256", "blake3"])
@pytest.mark.parametrize("which", ["zeros", "of other bytes", "of the other hash", "of before"])
@pytest.mark.threat("P2")
def test_a_list_of_digests_that_a_holder_of_the_key_changes(
    which: str, hash: Hash, vault: Vault
) -> None:
    before, saved = torch.zeros(8), torch.arange(8.0)
    for one in (before, saved):
        dcp.save({"w": one}, storage_writer=CheckpointWriter(vault, "run", hash=hash))
    other: Hash = "sha256" if hash == "blake3" else "blake3"
    forged = {
        "zeros": bytes(32),
        "of other bytes": _native.chunk_digests(torch.ones(8).numpy().data, computed(hash)),
        "of the other hash": _native.chunk_digests(saved.numpy().data, computed(other)),
        "of before": _native.chunk_digests(before.numpy().data, computed(hash)),
    }[which]
    put_list(vault, forged)
    problem = refusal_of_load(vault)
    assert type(problem) is ForeignPart
    assert "not the list that its rank signed" in str(problem)


@pytest.mark.parametrize("hash", ["sha256", "blake3"])
@pytest.mark.threat("P2")
def test_a_list_of_digests_that_is_cut(hash: Hash, vault: Vault) -> None:
    saved = {"w": torch.arange(3 * 4096.0)}
    dcp.save(saved, storage_writer=CheckpointWriter(vault, "run", hash=hash))
    whole = _native.chunk_digests(saved["w"].numpy().data, computed(hash))
    assert len(whole) == 4 * 32
    put_list(vault, whole)  # the list is unchanged
    dcp.load({"w": torch.zeros(3 * 4096)}, storage_reader=CheckpointReader(vault, "run"))
    put_list(vault, whole[:-32])
    with pytest.raises(CheckpointException) as raised:
        dcp.load({"w": torch.zeros(3 * 4096)}, storage_reader=CheckpointReader(vault, "run"))
    ((problem, _),) = raised.value.failures.values()
    assert type(problem) is TruncatedFile


@pytest.mark.threat("P2")
def test_the_files_of_an_older_versions_digests_put_back(vault: Vault) -> None:
    for _ in range(2):
        dcp.save({"w": torch.arange(8.0)}, storage_writer=CheckpointWriter(vault, "run"))
    older, newer = (vault.find("run", number).copy.folder.local for number in (1, 2))
    shutil.copy(older / "rank-00000.digests", newer / "rank-00000.digests")
    problem = refusal_of_load(vault)
    assert type(problem) is ForeignPart
    assert "not the file that the manifest lists" in str(problem)


@pytest.mark.parametrize(
    ("named", "error"),
    [("the other", ForeignPart), ("md5", NotAVault), ("", NotAVault), (None, NotAVault)],
)
@pytest.mark.threat("P2")
def test_a_manifest_that_names_another_hash_or_none(
    named: str | None, error: type[VaultError], vault: Vault
) -> None:
    """A holder of the key names another hash in the manifest than the rank has signed."""
    writer = CheckpointWriter(vault, "run", hash="blake3")
    dcp.save({"w": torch.arange(8.0)}, storage_writer=writer)
    copy = vault.find("run").copy
    path = copy.folder / "manifest"
    manifest = json.loads(copy.place.open("manifest", path.local.read_bytes(), "the manifest"))
    part = next(one for one in manifest["parts"] if one["name"] == "rank-00000")
    assert part.pop("hash") == "blake3"
    if named is not None:
        part["hash"] = "sha256" if named == "the other" else named
    (vault.path / "ledger.json").local.unlink()  # the ledger knows the manifest's digest
    path.local.write_bytes(copy.place.seal("manifest", json.dumps(manifest).encode()))
    assert type(refusal_of_load(vault)) is error


@pytest.mark.threat("P2")
def test_what_a_rank_signed_of_an_older_version(vault: Vault) -> None:
    """The older version has another hash, and the list and the part that belong to it."""
    for hash in ("blake3", "sha256"):
        writer = CheckpointWriter(vault, "run", hash=hash)
        dcp.save({"w": torch.arange(8.0)}, storage_writer=writer)
    older, newer = (vault.find("run", number) for number in (1, 2))
    content = older.manifest.content
    vault.commit(newer.copy, "checkpoint", "run", older.manifest.parts, content)
    problem = refusal_of_load(vault)
    assert type(problem) is ForeignPart
    assert "is of another checkpoint than" in str(problem)


def test_metadata_that_were_refused_are_no_empty_checkpoint(vault: Vault) -> None:
    dcp.save({"w": torch.arange(8.0)}, storage_writer=CheckpointWriter(vault, "run"))
    (vault.find("run").copy.folder / "manifest").local.write_bytes(b"x" * 100)
    metadata = CheckpointReader(vault, "run").read_metadata()
    with pytest.raises(ForeignPart):
        print(metadata.state_dict_metadata)


def two_ranks(
    vault: Vault, change: Callable[[dict[str, Any], dict[str, Any]], tuple[int, int]]
) -> None:
    """Makes rank 0's checkpoint one of two ranks, both of which sign their part after `change`."""
    stored = vault.find("run")
    content = json.loads(stored.manifest.content)
    first = json.loads(content["contributions"][0]["statement"])
    second = json.loads(content["contributions"][0]["statement"])
    first["items"], second["items"] = first["items"][:1], second["items"][1:]
    ranks = change(first, second)
    signed = [
        signing.sign(signing.credentials_of(rank, 2), 2, own(document))
        for rank, document in zip(ranks, (first, second), strict=True)
    ]
    content["contributions"] = [asdict(one) for one in signed]
    manifest = stored.manifest
    vault.commit(stored.copy, "checkpoint", "run", manifest.parts, json.dumps(content))


def own(document: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name not in signing.FIELDS}


@pytest.mark.parametrize("ranks", [(0, 1), (0, 0)])
@pytest.mark.threat("P3")
def test_a_rank_that_signs_for_another_ranks_part(ranks: tuple[int, int], vault: Vault) -> None:
    """A part belongs to the rank in its name, and each rank signs only once."""
    saved = {"a": torch.arange(8.0), "b": torch.zeros(8)}
    dcp.save(saved, storage_writer=CheckpointWriter(vault, "run"))
    two_ranks(vault, lambda first, second: ranks)
    with pytest.raises(CheckpointException) as raised:
        dcp.load(dict(saved), storage_reader=CheckpointReader(vault, "run"))
    ((problem, _),) = raised.value.failures.values()
    assert type(problem) is ForeignPart


def test_a_statement_that_is_nested_too_deeply(vault: Vault) -> None:
    """A worker can sign any text."""
    credentials = signing.credentials_of(0, 1)
    real = json.dumps
    text = '{"rank": 0, "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sealring.vault.signing.json.dumps", lambda _: text)
        signed = signing.sign(credentials, 1, {})
    assert json.dumps is real
    with pytest.raises(
        VaultError, match="not over what it says", check=coded("vault.unadmitted_signer")
    ):
        signing.check(signed, credentials.authorities, "tests", "it")


@pytest.mark.parametrize("content", [b"", b"x", b"\x80\x02.", bytes(100), b"PK\x03\x04"])
def test_entries_that_are_no_pickles(content: bytes) -> None:
    with pytest.raises(VaultError, match="the entry 'name'", check=coded("vault.unsafe_entry")):
        load_entry("name", content)
