"""Sources that an attacker made: each is refused by name, and nothing is committed."""

from __future__ import annotations

import io
import os
import resource
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sealring.errors import BadSource, ConfigurationError, SealringError, UnsafePath
from sealring.vault import Dataset
from sealring.vault.datasets import formats
from sealring.vault.vault import Vault
from tests.vault.datasets.made import json_lines, sealed, tar, tokens


def refused(vault: Vault, source: Path, error: type[SealringError], about: str, **how: Any) -> None:
    with pytest.raises(error, match=about) as found:
        sealed(vault, source, **how)
    assert type(found.value) is error
    assert not list(vault.path.local.rglob("manifest"))
    assert not [path for path in vault.path.local.rglob("*") if path.name.startswith(".shard")]


@pytest.mark.parametrize("name", ["../out", "/etc/passwd", "a/../../b", "a//b", "a/./b", ""])
@pytest.mark.threat("P16")
def test_paths_that_leave_a_tar(vault: Vault, tmp_path: Path, name: str) -> None:
    source = tar(tmp_path / "bad.tar", [("a.txt", b"fine"), (name, b"not")])
    refused(vault, source, UnsafePath, "leads out of the archive")


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE]
)
@pytest.mark.threat("P16")
def test_links_and_devices_in_a_tar(vault: Vault, tmp_path: Path, kind: bytes) -> None:
    with tarfile.open(tmp_path / "bad.tar", "w") as archive:
        member = tarfile.TarInfo("a.txt")
        member.type, member.linkname = kind, "/etc/passwd"
        archive.addfile(member)
    refused(vault, tmp_path / "bad.tar", UnsafePath, r"'a\.txt' is a link, a device")


def test_a_sparse_file_in_a_tar_that_would_be_huge(vault: Vault, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "bad.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("a.txt")
        member.pax_headers = {
            "GNU.sparse.major": "1", "GNU.sparse.minor": "0",
            "GNU.sparse.name": "a.txt", "GNU.sparse.realsize": str(1 << 43),
        }  # fmt: skip
        data = b"1\n0\n512\n".ljust(512, b"\0") + bytes(512)
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    refused(vault, tmp_path / "bad.tar", UnsafePath, "sparse")


def test_names_that_a_tar_has_twice(vault: Vault, tmp_path: Path) -> None:
    source = tar(tmp_path / "bad.tar", [("a.txt", b"1"), ("a.txt", b"2")])
    refused(vault, source, BadSource, "the file 'a.txt' twice")
    source = tar(tmp_path / "bad.tar", [("a.txt", b"1"), ("b.txt", b"2"), ("a.jpg", b"3")])
    refused(vault, source, BadSource, "the sample 'a' twice")


def test_a_tar_that_names_more_bytes_than_it_has(vault: Vault, tmp_path: Path) -> None:
    member = tarfile.TarInfo("a.txt")
    member.size = 1 << 40
    (tmp_path / "bad.tar").write_bytes(member.tobuf() + bytes(1024))
    refused(vault, tmp_path / "bad.tar", BadSource, "'a.txt' has 1099511627776 bytes")
    member.size = 10_000
    (tmp_path / "bad.tar").write_bytes(member.tobuf() + bytes(1024))
    refused(vault, tmp_path / "bad.tar", BadSource, "cut off|cannot be read as a tar archive")
    header = tarfile.TarInfo("long")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 1 << 32
    (tmp_path / "bad.tar").write_bytes(header.tobuf() + bytes(1024))
    refused(
        vault,
        tmp_path / "bad.tar",
        BadSource,
        "bad.tar: what is named at byte 512 has 4294967296 bytes",
    )
    (tmp_path / "bad.tar").write_bytes(b"no archive" * 100)
    refused(vault, tmp_path / "bad.tar", BadSource, "cannot be read as a tar archive")


@pytest.mark.threat("P16")
def test_a_line_of_one_gibibyte(vault: Vault, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    with open(path, "wb") as file:  # a hole: it takes no disk
        file.write(b'{"a":"')
        file.truncate(1 << 30)
    refused(vault, path, BadSource, "the line at byte 0 is longer than 1048576", shard=1 << 30)
    refused(vault, path, BadSource, "is longer than 1048576", shard=1 << 29)


@pytest.mark.parametrize(
    ("line", "about"),
    [
        (b"not json", "not JSON"),
        (b"[1, 2]", "no JSON object"),
        (b'{"a": 1, "a": 2}', "a key twice"),
        (b'{"a": ' * 100_000, "not JSON"),
        (b'{"a": "\xff"}', "not JSON"),
    ],
)
def test_lines_that_are_no_json_objects(
    vault: Vault, tmp_path: Path, line: bytes, about: str
) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b'{"fine": 1}\n' + line + b"\n")
    refused(vault, tmp_path / "bad.jsonl", BadSource, f"at byte 12 .*{about}", shard=1 << 24)


def test_symlinks_pipes_and_other_files_in_a_folder(vault: Vault, tmp_path: Path) -> None:
    source = json_lines(tmp_path / "source")
    (source / "2.jsonl").symlink_to("/etc/passwd")
    refused(vault, source, UnsafePath, r"2\.jsonl is a symlink")
    (source / "2.jsonl").unlink()
    os.mkfifo(source / "2.jsonl")
    refused(vault, source, UnsafePath, "neither a file nor a folder")
    (source / "2.jsonl").unlink()
    (source / "readme.md").write_text("hello")
    refused(vault, source, BadSource, r"readme\.md is none of")
    (source / "readme.md").unlink()
    (source / "some.tar").write_text("hello")
    refused(vault, source, BadSource, "mixes formats")
    refused(vault, tmp_path / "nothing", ConfigurationError, "does not exist")
    (tmp_path / "empty").mkdir()
    refused(vault, tmp_path / "empty", ConfigurationError, "no files to ingest")


@pytest.mark.threat("P17")
def test_a_file_exchanged_for_a_symlink_after_it_was_listed(
    vault: Vault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = json_lines(tmp_path / "source", files=1)
    path = source / "0.jsonl"
    real = Vault.new_version

    def exchanging(self: Vault, *others: str) -> object:
        path.unlink()
        path.symlink_to("/etc/passwd")
        return real(self, *others)

    monkeypatch.setattr(Vault, "new_version", exchanging)
    refused(vault, source, BadSource, r"0\.jsonl cannot be read")


@pytest.mark.threat("P16")
def test_parquet_that_would_fill_the_memory(
    vault: Vault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "SMALL_ROW_GROUP", 1 << 24)
    path = tmp_path / "bomb.parquet"
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 100_000, pa.int32()), ["x" * 300_000])
    pq.write_table(pa.table({"a": column}), path, compression="zstd")
    assert path.stat().st_size < 1 << 14  # and 30 GB when it is opened
    refused(vault, path, BadSource, r"bomb\.parquet would become more than 1000 times as large")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20  # KiB
    monkeypatch.setattr(formats, "SMALL_ROW_GROUP", 1 << 20)
    monkeypatch.setattr(formats, "LARGEST_EXPANSION", 10)
    zeros = pa.table({"a": pa.array(np.zeros(300_000))})
    pq.write_table(zeros, path, compression="zstd", use_dictionary=False)
    refused(vault, path, BadSource, "row group 0 would become more than 10 times")


def test_parquet_that_is_none(vault: Vault, tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    path.write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    refused(vault, path, BadSource, "cannot be read as Parquet")
    pq.write_table(pa.table({"a": list(range(1000))}), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + bytes(len(whole) // 2 - 4) + whole[len(whole) // 2 :])
    refused(vault, path, BadSource, "cannot be read as Parquet")
    pq.write_table(pa.table([[1], [2]], names=["a", "a"]), path)
    refused(vault, path, BadSource, "a column twice")


def test_columns_that_differ_between_files(vault: Vault, tmp_path: Path) -> None:
    source = tmp_path / "rows"
    source.mkdir()
    pq.write_table(pa.table({"a": [1]}), source / "1.parquet")
    pq.write_table(pa.table({"a": ["1"]}), source / "2.parquet")
    refused(vault, source, BadSource, r"2\.parquet has other columns")


def test_token_files_that_are_none(vault: Vault, tmp_path: Path) -> None:
    source = tokens(tmp_path / "tokens")
    with open(source / "a.bin", "ab") as file:
        file.write(b"\0")
    with pytest.raises(BadSource, match="no whole number of uint16"):
        sealed(vault, source, dtype="uint16")
    np.save(tmp_path / "a.npy", np.array([{"pickled": 1}], dtype=object), allow_pickle=True)
    refused(vault, tmp_path / "a.npy", BadSource, "no array of one dimension")
    np.save(tmp_path / "a.npy", np.zeros((2, 2), dtype="<u2"))
    refused(vault, tmp_path / "a.npy", BadSource, "no array of one dimension")
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(100))
    refused(vault, tmp_path / "a.npy", BadSource, "has 4294967295 bytes")


def test_a_sample_above_the_limit(vault: Vault, tmp_path: Path) -> None:
    (tmp_path / "images" / "a").mkdir(parents=True)
    (tmp_path / "images" / "a" / "1.png").write_bytes(bytes(2000))
    refused(vault, tmp_path / "images", BadSource, "has 2000 bytes, and the limit is 1000",
            sample=1000)  # fmt: skip
    source = tar(tmp_path / "a.tar", [("a.1", bytes(600)), ("a.2", bytes(600))])
    refused(
        vault,
        source,
        BadSource,
        "the sample 'a' has 1200 bytes, and the limit is 1000",
        sample=1000,
    )


def folded(size: int, rows: int) -> Any:
    """Many copies of one long text, of which the file has one."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["x" * size]))


@pytest.mark.parametrize("inside", ["struct", "list", "map"])
@pytest.mark.threat("P16")
def test_parquet_that_would_fill_the_memory_from_inside(
    vault: Vault, tmp_path: Path, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "SMALL_ROW_GROUP", 1 << 22)
    text, ends = folded(1 << 20, 100), pa.array(range(101), pa.int32())
    column = {
        "struct": lambda: pa.StructArray.from_arrays([text], ["s"]),
        "list": lambda: pa.ListArray.from_arrays(ends, text),
        "map": lambda: pa.MapArray.from_arrays(ends, text, pa.array(range(100))),
    }[inside]()
    path = tmp_path / "bomb.parquet"
    pq.write_table(pa.table({"a": column}), path, compression="zstd", store_schema=False)
    refused(vault, path, BadSource, r"bomb\.parquet would become more than 1000 times as large")


def test_bytes_are_not_turned_into_text(vault: Vault, tmp_path: Path) -> None:
    path = tmp_path / "bytes.parquet"
    pq.write_table(pa.table({"a": [{"b": b"\xff"}]}), path)
    refused(vault, path, BadSource, "JSON has no bytes")
    pq.write_table(pa.table({"a": pa.array([b"\xff" * 4], pa.binary(4))}), path)
    sealed(vault, path)
    assert Dataset(vault, "data")[0] == {"a": b"\xff" * 4}


def extended(name: str, kind: bytes, content: bytes) -> bytes:
    header = tarfile.TarInfo(name)
    header.type, header.size = kind, len(content)
    return header.tobuf(tarfile.GNU_FORMAT) + content.ljust(512, b"\0")


PARSERS = {
    "headers of headers.tar": extended("p", tarfile.XHDTYPE, b"12 path=abc\n") * 5000,
    "names of names.tar": extended("././@LongLink", tarfile.GNUTYPE_LONGNAME, b"abc\0") * 5000,
    "signs.npy": b"{'descr':'<u2','fortran_order':False,'shape':(" + b"-" * 5000 + b"1,)}",
    "open.npy": b"{" + b" " * 9000,
    "days.parquet": b"",
}


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.threat("P16")
def test_what_makes_a_parser_fail_otherwise(vault: Vault, tmp_path: Path, name: str) -> None:
    path, content = tmp_path / name, PARSERS[name]
    if path.suffix == ".npy":
        content = b"\x93NUMPY\x02\x00" + len(content).to_bytes(4, "little") + content
    path.write_bytes(content)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"a": pa.array([2**31 - 1], pa.date32())}), path)
    refused(vault, path, BadSource, f"{name} cannot be read as")


@pytest.mark.threat("P16")
def test_a_tar_that_is_damaged_in_the_middle(vault: Vault, tmp_path: Path) -> None:
    path = tar(tmp_path / "bad.tar", [("a.txt", b"fine"), ("b.txt", b"lost"), ("c.txt", b"lost")])
    content = bytearray(path.read_bytes())
    content[1024 + 148] ^= 1  # the second header's checksum
    path.write_bytes(content)
    refused(
        vault, path, BadSource, "what follows byte 1024 is neither a file nor the archive's end"
    )
