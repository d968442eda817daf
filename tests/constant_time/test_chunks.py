"""The GPU's code that opens chunks of sealed files, run on the CPU: right, and without a leak."""

from __future__ import annotations

import struct

import pytest
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from sealring.core.engine.cuda.compiler import CHUNKS
from tests.constant_time import kernels
from tests.constant_time.kernels import KEY
from tests.constant_time.ptx import Machine

pytestmark = pytest.mark.skipif(bool(kernels.missing()), reason=kernels.missing() or "-")

BASE = bytes(range(200, 212))
NUMBER = (3 << 32) + 0x01020304
_KEYS, _CHUNKS, _FAILED, _SEALED, _PLAIN = 0x1000, 0x2000, 0x7F000, 0x80000, 0x180000
SIZES = (0, 1, 63, 64, 65, 130, 8192 + 64, 16384)


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> str:
    return kernels.compiled(tmp_path_factory.mktemp("ptx"), main=CHUNKS)


def plain_of(size: int) -> bytes:
    return bytes(i * 11 + i // 256 & 255 for i in range(size))


def sealed(size: int) -> bytes:
    """As c2sp.org/chunked-encryption says: the base nonce XOR the chunk's number, big-endian."""
    nonce = (int.from_bytes(BASE, "big") ^ NUMBER).to_bytes(12, "big")
    return ChaCha20Poly1305(KEY).encrypt(nonce, plain_of(size), None)


def opened(ptx: str, cipher: bytes, size: int, misaligned: int = 0) -> bytes | None:
    """The plaintext, or None where the chunk was refused and nothing was written."""
    machine = Machine(ptx, 1)

    def put(at: int, data: bytes, secret: bool) -> None:
        machine.memory.bytes[at : at + len(data)] = data
        machine.memory.secret[at : at + len(data)] = bytes([secret]) * len(data)

    put(_KEYS + 64, KEY + BASE, True)  # the second file's
    put(_CHUNKS, struct.pack("<QQQII", 16, misaligned, NUMBER, size, 1), False)
    put(_FAILED, b"\xff" * 8, False)
    put(_SEALED + 16, cipher, True)
    put(_PLAIN, b"\xaa" * (misaligned + size + 64), False)
    machine.launch(
        "open_chunks",
        struct.pack("<QQQQQII", _SEALED, _PLAIN, _CHUNKS, _KEYS, _FAILED, 1, 0),
    )
    assert not machine.leaks
    result = bytes(machine.memory.bytes[_PLAIN : _PLAIN + misaligned + size + 64])
    assert result[misaligned + size :] == b"\xaa" * 64, "written past the chunk's end"
    if machine.memory.bytes[_FAILED : _FAILED + 8] == b"\xff" * 8:
        return result[misaligned : misaligned + size]
    assert result == b"\xaa" * len(result), "a forged chunk was written"
    return None


@pytest.mark.parametrize("size", SIZES)
def test_a_chunk_opens(ptx: str, size: int) -> None:
    assert opened(ptx, sealed(size), size) == plain_of(size)


def test_a_chunk_opens_at_any_address(ptx: str) -> None:
    assert opened(ptx, sealed(130), 130, misaligned=3) == plain_of(130)


@pytest.mark.parametrize("at", [0, 100, 129, 130, 145])
@pytest.mark.threat("V3")
def test_a_forged_chunk_leaves_nothing(ptx: str, at: int) -> None:
    forged = bytearray(sealed(130))
    forged[at] ^= 1
    assert opened(ptx, bytes(forged), 130) is None


def test_a_shortened_chunk_leaves_nothing(ptx: str) -> None:
    assert opened(ptx, sealed(130)[:64] + sealed(130)[-16:], 64) is None
