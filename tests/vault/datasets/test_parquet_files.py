"""Parquet that stays Parquet: what other tools read with the keys, and what they do not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sealring.errors import (
    BadSource,
    ConfigurationError,
    MissingPart,
    OutputExists,
    TamperedChunk,
    UnsafePath,
    Unsupported,
)
from sealring.vault import ParquetFiles, keys, trees
from sealring.vault.datasets.parquet_files import seal_parquet
from sealring.vault.vault import Vault
from tests.vault.datasets.made import json_lines, sealed
from tests.vault.test_commands import Shell


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    folder = tmp_path / "tables"
    (folder / "more").mkdir(parents=True)
    for number, inside in enumerate(("a.parquet", "more/b.parquet")):
        column = [f"some secret text {number} {row}" for row in range(40)]
        pq.write_table(pa.table({"text": column}), folder / inside, row_group_size=20)
    return folder


@pytest.fixture
def encrypted(vault: Vault, tables: Path, tmp_path: Path) -> Path:
    out = tmp_path / "out"
    assert seal_parquet(vault, tables, out, "tables", lambda count: None) == 1
    return out


def test_pyarrow_reads_the_files_with_their_keys(
    vault: Vault, tables: Path, encrypted: Path
) -> None:
    files = ParquetFiles(vault, "tables", encrypted)
    assert files.files == ["a.parquet", "more/b.parquet"]
    for inside in files.files:
        wanted = pq.read_table(tables / inside)
        with files.open(inside) as opened:
            assert opened.read() == wanted
        properties = files.decryption_properties(inside)
        assert pq.read_table(encrypted / inside, decryption_properties=properties) == wanted
        assert b"secret" not in (encrypted / inside).read_bytes()
        assert b"text" not in (encrypted / inside).read_bytes()  # the footer is encrypted too


def test_a_name_that_is_not_unicode(vault: Vault, tables: Path, tmp_path: Path) -> None:
    (tables / "a.parquet").rename(tables / os.fsdecode(b"\xff.parquet"))
    with pytest.raises(UnsafePath, match="has a name that is not UTF-8"):
        seal_parquet(vault, tables, tmp_path / "out", "tables", lambda count: None)
    assert not (tmp_path / "out").exists()


def test_after_a_rotation_the_keys_are_those_of_the_files(vault: Vault, encrypted: Path) -> None:
    trees.rotate(vault, lambda count: None)
    with ParquetFiles(vault, "tables", encrypted).open("a.parquet") as opened:
        assert opened.metadata.num_rows == 40


def test_each_file_has_a_key_of_its_own_and_no_stored_prefix(vault: Vault, encrypted: Path) -> None:
    files = ParquetFiles(vault, "tables", encrypted)
    one = bytes(files._secrets.part(0, 32))
    two = bytes(files._secrets.part(32, 32))
    assert one != two
    import pyarrow.parquet.encryption as pe

    without = pe.create_decryption_properties(one)
    with pytest.raises(OSError, match="AAD"):
        pq.read_table(encrypted / "a.parquet", decryption_properties=without)


def test_files_that_are_exchanged_changed_or_cut(
    vault: Vault, key: Path, tables: Path, encrypted: Path, tmp_path: Path
) -> None:
    path = encrypted / "a.parquet"
    whole = path.read_bytes()
    files = ParquetFiles(vault, "tables", encrypted)

    def refused() -> None:
        with pytest.raises(TamperedChunk, match=r"a\.parquet is not authentic"):  # noqa: SIM117
            with files.open("a.parquet") as opened:
                opened.read()

    path.write_bytes((encrypted / "more/b.parquet").read_bytes())
    refused()
    seal_parquet(vault, tables, tmp_path / "second", "tables", lambda count: None)
    path.write_bytes((tmp_path / "second" / "a.parquet").read_bytes())
    refused()
    path.write_bytes((tables / "a.parquet").read_bytes())  # plaintext in its place
    refused()
    for at in range(4, len(whole) - 8, 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        refused()
    path.write_bytes(whole[:-9])
    refused()
    path.unlink()
    with pytest.raises(MissingPart, match=r"a\.parquet is missing"):  # noqa: SIM117
        with files.open("a.parquet"):
            pass


def test_the_same_file_under_another_key_has_other_bytes_and_does_not_open(
    vault: Vault, key: Path, tables: Path, encrypted: Path, tmp_path: Path
) -> None:
    other = Vault.create(tmp_path / "other", keys.key_file(key), "owner")
    seal_parquet(other, tables, tmp_path / "theirs", "tables", lambda count: None)
    files = ParquetFiles(vault, "tables", tmp_path / "theirs")
    with pytest.raises(TamperedChunk), files.open("a.parquet"):
        pass


def test_bad_input(vault: Vault, tables: Path, encrypted: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputExists):
        seal_parquet(vault, tables, encrypted, "tables", lambda count: None)
    with pytest.raises(BadSource, match=r"no \.parquet file"):
        seal_parquet(vault, json_lines(tmp_path / "x"), tmp_path / "y", "t", lambda count: None)
    (tables / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(BadSource, match="cannot be read as Parquet"):
        seal_parquet(vault, tables, tmp_path / "y", "t", lambda count: None)
    assert not (tmp_path / "y").exists()
    sealed(vault, tmp_path / "x", "data")
    with pytest.raises(Unsupported, match="no Parquet files"):
        ParquetFiles(vault, "data", encrypted)
    with pytest.raises(ConfigurationError, match="is none of the 2 files"):
        ParquetFiles(vault, "tables", encrypted).decryption_properties("c.parquet")


def test_parquet_as_a_command(
    tmp_path: Path, tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEALRING_VAULT_KEY", "k")
    sh = Shell(tmp_path)
    sh("init", "v")
    found = json.loads(sh("parquet", "v", "tables", "--out", "out", "--name", "t", "--json"))
    assert found == {"name": "t", "version": 1}
    assert "two holds the encrypted files" in sh("parquet", "v", "tables", "--out", "two")
