"""What an adversary with the disk does to a dataset: the exact error, and nothing given out."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from sealring.errors import (
    ForeignPart,
    MissingPart,
    RolledBack,
    TamperedChunk,
    TruncatedFile,
    VaultBusy,
    VaultError,
)
from sealring.vault import Dataset, keys, trees
from sealring.vault.datasets.shards import index_of
from sealring.vault.vault import Vault
from tests.codes import coded
from tests.vault.datasets.made import json_lines, sealed


def shards(vault: Vault, version: int | None = None) -> list[Path]:
    stored = vault.find("data", version)
    return [stored.copy.folder / part.name for part in stored.manifest.parts]


def read_all(vault: Vault, version: int | None = None) -> list[int]:
    dataset = Dataset(vault, "data", version=version)
    try:
        return [dataset[number]["n"] for number in range(len(dataset))]
    finally:
        dataset.close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return json_lines(tmp_path / "source", count=8)


@pytest.mark.threat("P14")
def test_every_byte_of_a_shard_flipped(vault: Vault, source: Path) -> None:
    sealed(vault, source)
    path = shards(vault)[0]
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(VaultError, match="part shard-00000000 of 'data' version 1") as found:
            read_all(vault)
        wanted = ForeignPart if 24 <= at < 56 else TamperedChunk
        assert type(found.value) is wanted, at
    path.write_bytes(whole)
    assert read_all(vault) == list(range(8))


@pytest.mark.threat("P14")
def test_every_truncation_of_a_shard(vault: Vault, source: Path) -> None:
    sealed(vault, source)
    path = shards(vault)[1]
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(TruncatedFile, match="part shard-00000001 of 'data' version 1"):
            read_all(vault)
    path.write_bytes(whole + b"\0")
    with pytest.raises(TruncatedFile, match="part shard-00000001"):
        read_all(vault)
    path.unlink()
    with pytest.raises(MissingPart, match="part shard-00000001 of 'data' version 1 is missing"):
        read_all(vault)


@pytest.mark.threat("P14")
def test_shards_exchanged_for_others(vault: Vault, key: Path, source: Path, tmp_path: Path) -> None:
    for path in source.iterdir():  # shards of one size
        path.write_text('{"n": 0}\n')
    sealed(vault, source)
    with open(source / "1.jsonl", "a") as file:
        file.write('{"n": 1}\n')
    sealed(vault, source)
    first, second = shards(vault)[:2]
    (older,) = shards(vault, 1)[:1]
    other = Vault.create(tmp_path / "other", keys.key_file(key), "owner")
    sealed(other, source)
    whole = first.read_bytes()
    for foreign in (older, shards(other)[0], second):
        if foreign.stat().st_size == len(whole):
            shutil.copy(foreign, first)
            with pytest.raises(ForeignPart, match="part shard-00000000 of 'data' version 2"):
                read_all(vault)
    first.write_bytes(whole)
    assert read_all(vault) == [0, 0, 1]


@pytest.mark.threat("P15")
def test_an_older_index_put_back(vault: Vault, source: Path, tmp_path: Path) -> None:
    sealed(vault, source)
    (source / "2.jsonl").write_text('{"n": 8}\n')
    sealed(vault, source)
    newest = vault.find("data").copy.folder.parent
    shutil.rmtree(newest.local)
    with pytest.raises(RolledBack, match="'data' was last written as version 2"):
        read_all(vault)
    assert read_all(vault, version=1) == list(range(8))  # by its number it opens


@pytest.mark.threat("P15")
def test_an_older_manifest_in_the_newest_version(vault: Vault, source: Path) -> None:
    sealed(vault, source)
    (source / "2.jsonl").write_text('{"n": 8}\n')
    sealed(vault, source)
    old, new = (vault.find("data", number).copy.folder for number in (1, 2))
    shutil.copy((old / "manifest").local, (new / "manifest").local)
    with pytest.raises(ForeignPart, match="the manifest"):
        read_all(vault)


@pytest.mark.threat("P15")
def test_a_dataset_of_another_vault(vault: Vault, key: Path, source: Path, tmp_path: Path) -> None:
    other = Vault.create(tmp_path / "other", keys.key_file(key), "owner")
    sealed(other, source)
    sealed(vault, source)
    here, there = (one.find("data").copy.folder for one in (vault, other))
    shutil.rmtree(here.local)
    shutil.copytree(there.local, here.local)
    with pytest.raises(ForeignPart, match="no key that this vault wrapped"):
        read_all(vault)


def test_a_dataset_that_is_rotated_while_it_is_read(vault: Vault, source: Path) -> None:
    sealed(vault, source)
    dataset = Dataset(vault, "data")
    trees.rotate(vault, lambda count: None)
    with pytest.raises(
        VaultBusy, match="open the dataset again", check=coded("vault.keys_changed")
    ):
        dataset[0]
    assert read_all(vault) == list(range(8))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda index: index | {"version": 2}, "vault.later_version"),
        (lambda index: index | {"shards": index["shards"][:-1]}, "vault.not_a_vault"),
        (lambda index: index | {"fields": [{"name": "a", "kind": "pickle"}]}, "vault.not_a_vault"),
        (lambda index: {"version": 1}, "vault.not_a_vault"),
    ],
)
def test_an_index_that_a_holder_of_the_key_wrote(
    vault: Vault, source: Path, change: object, code: str
) -> None:
    sealed(vault, source)
    stored = vault.find("data")
    assert callable(change)
    text = json.dumps(change(json.loads(stored.manifest.content)))
    vault.commit(stored.copy, "dataset", "data", stored.manifest.parts, text)
    with pytest.raises(VaultError, match="the index of 'data' version 1", check=coded(code)):
        Dataset(vault, "data")


def test_a_table_that_does_not_fit_its_samples(vault: Vault, source: Path) -> None:
    """A holder of the key moves a byte from the samples to the table: reads stay inside."""
    sealed(vault, source, shard=100_000)
    stored = vault.find("data")
    index = index_of(stored)
    moved = {**json.loads(index.text())}
    moved["shards"][0]["samples"] += 1
    moved["shards"][0]["bytes"] -= 8
    vault.commit(stored.copy, "dataset", "data", stored.manifest.parts, json.dumps(moved))
    with pytest.raises(ForeignPart, match="the table of shard-00000000 does not fit"):
        read_all(vault)


def test_the_digest_covers_order_fields_and_every_shard(vault: Vault, source: Path) -> None:
    sealed(vault, source)
    index = index_of(vault.find("data"))
    assert replace(index, recipe="", inputs=[]).digest == index.digest  # how it was made is not
    others = [
        replace(index, shards=index.shards[::-1]),
        replace(index, shards=index.shards[:-1]),
        replace(index, fields=[]),
    ]
    assert len({one.digest for one in [index, *others]}) == 4
