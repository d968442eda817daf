"""What the GPU is told to open, done by OpenSSL in its place: tests/gpu has the GPU itself."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA512
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from sealring.engine.cuda.chunks import CHUNK_BYTES
from sealring.errors import ConfigurationError
from sealring.vault.gpu_batches import Sample, SealedPart, plan_of
from tests.vault.sealed_parts import place, sealed_parts

SIZES = (1, 100, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES - 1, 5 * CHUNK_BYTES + 777)


def file_key(path: Path, number: int) -> tuple[bytes, int]:
    """The key and the base nonce, by the standard's text."""
    part, salt = f"shard {number}", path.read_bytes()[:24]
    info = b"c2sp.org/chunked-encryption@v1+AEAD_CHACHA20_POLY1305\0" + salt + place().context(part)
    derived = HKDFExpand(SHA512(), 76, info).derive(bytes(memoryview(place().part_key(part))))
    return derived[:32], int.from_bytes(derived[32:44], "big")


def opened(samples: list[Sample], files: list[SealedPart], folder: Path) -> list[bytes]:
    plan = plan_of(samples, files)
    sealed, plain = bytearray(plan.sealed_bytes), bytearray(plan.plain_bytes)
    for file, offset, size, at in plan.reads:
        sealed[at : at + size] = os.pread(files[file].descriptor, size, offset)
    for chunk in plan.chunks:
        start, to, number, size, file = (int(value) for value in chunk)
        key, base = file_key(folder / f"{file}.sealed", file)
        nonce = (base ^ number).to_bytes(12, "big")
        cipher = bytes(sealed[start : start + size + 16])
        assert start % 16 == 0
        assert to % 16 == 0
        plain[to : to + size] = ChaCha20Poly1305(key).decrypt(nonce, cipher, None)
    return [
        bytes(plain[start : start + sample.bytes])
        for start, sample in zip(plan.starts, samples, strict=True)
    ]


def test_the_planned_chunks_hold_the_samples(tmp_path: Path) -> None:
    contents = [random.Random(size).randbytes(size) for size in SIZES]
    draw = random.Random(1)
    with sealed_parts(tmp_path, contents) as files:
        samples = [Sample(file, 0, len(plain)) for file, plain in enumerate(contents)]
        for _ in range(50):
            file = draw.randrange(len(contents))
            offset = draw.randrange(len(contents[file]))
            samples.append(Sample(file, offset, draw.randint(1, len(contents[file]) - offset)))
        expected = [contents[s.file][s.offset : s.offset + s.bytes] for s in samples]
        assert opened(samples, files, tmp_path) == expected


@pytest.mark.parametrize("sample", [Sample(0, 90, 11), Sample(0, -1, 5), Sample(0, 3, 0)])
def test_a_sample_that_is_not_there(tmp_path: Path, sample: Sample) -> None:
    with (
        sealed_parts(tmp_path, [bytes(100)]) as files,
        pytest.raises(ConfigurationError, match=r"0\.sealed holds 100 bytes"),
    ):
        plan_of([sample], files)
