"""Our vectors, through both implementations."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from sealring import _native
from sealring.errors import TamperedChunk, TruncatedFile, WrongKey
from tests.vault import slow
from tests.vault.vectors import make

FILES = sorted(make.HERE.glob("*.vector"))
ERRORS = {"truncated": TruncatedFile, "wrong key": WrongKey, "tampered": TamperedChunk}


@dataclass(frozen=True)
class Vector:
    expect: str
    aead: str
    key: bytes
    context: bytes
    payload: str | None
    sealed: bytes


def read(path: Path) -> Vector:
    header, _, sealed = path.read_bytes().partition(b"\n\n")
    lines = dict(line.split(": ", 1) for line in header.decode().splitlines())
    return Vector(
        lines["expect"],
        lines["aead"],
        bytes.fromhex(lines["key"]),
        bytes.fromhex(lines["context"]),
        lines.get("payload"),
        sealed,
    )


def native_open(key: bytes, suite: str, context: bytes, path: Path, threads: int = 0) -> bytes:
    file = os.open(path, os.O_RDONLY)
    try:
        reader = _native.SealedFileReader(
            file, _native.Secret(key), suite, context, "the file", threads
        )
        plain = bytearray(reader.length)
        reader.read_into(0, plain)
        return bytes(plain)
    finally:
        os.close(file)


def test_the_files_are_those_that_the_program_makes() -> None:
    made = {f"{case[0]}.vector": make.written(case) for case in make.cases()}
    assert {path.name: path.read_bytes() for path in FILES} == made
    assert {read(path).expect for path in FILES} == {"success", *ERRORS}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.threat("V6")
def test_each_vector_is_opened_or_refused_as_it_says(path: Path, tmp_path: Path) -> None:
    vector = read(path)
    sealed = tmp_path / "sealed"
    sealed.write_bytes(vector.sealed)
    if vector.expect == "success":
        plain = slow.open_(vector.key, vector.aead, vector.context, vector.sealed)
        assert native_open(vector.key, vector.aead, vector.context, sealed) == plain
        assert hashlib.sha256(plain).hexdigest() == vector.payload
    else:
        with pytest.raises(slow.Refused, match=f"^{vector.expect}$"):
            slow.open_(vector.key, vector.aead, vector.context, vector.sealed)
        with pytest.raises(ERRORS[vector.expect]):
            native_open(vector.key, vector.aead, vector.context, sealed)
