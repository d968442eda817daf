"""The GPU's ChaCha20-Poly1305, compiled for the CPU, against the official vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cryptography_vectors
import pytest
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from hypothesis import given, settings
from hypothesis import strategies as st

from sealring import _native

RFC = Path(cryptography_vectors.__file__).parent / "ciphers" / "ChaCha20Poly1305"
WYCHEPROOF = Path(__file__).parents[4] / "shared/vectors/wycheproof/chacha20_poly1305_test.json"
EDGES = (0, 1, 15, 16, 17, 63, 64, 65, 8191, 8192, 65535, 65536, 65537, 131072 + 63, 262144)


def test_rfc_8439_section_2_8_2() -> None:
    key = bytes(range(0x80, 0xA0))
    nonce = bytes.fromhex("070000004041424344454647")
    associated = bytes.fromhex("50515253c0c1c2c3c4c5c6c7")
    plain = (
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the "
        b"future, sunscreen would be it."
    )
    sealed = _native.gpu_aead_seal(key, nonce, associated, plain)
    assert sealed[-16:].hex() == "1ae10b594f09e26a7e902ecbd0600691"
    assert sealed[:8].hex() == "d31a8d34648e60db"
    assert _native.gpu_aead_open(key, nonce, associated, sealed) == plain


def test_every_vector_of_cryptography() -> None:
    count = 0
    for path in sorted(RFC.rglob("*.txt")):
        fields: dict[str, bytes] = {}
        for line in [*path.read_text().splitlines(), ""]:
            name, colon, value = line.partition(":")
            if colon and not line.startswith("#"):
                value = value.strip().strip('"')
                literal = name in ("AD", "IN") and not _is_hex(value)
                fields[name.strip()] = value.encode() if literal else bytes.fromhex(value)
            elif {"KEY", "NONCE", "IN", "AD", "CT", "TAG"} <= fields.keys():
                key, nonce, ad = fields["KEY"], fields["NONCE"], fields["AD"]
                if len(nonce) == 12:
                    sealed = _native.gpu_aead_seal(key, nonce, ad, fields["IN"])
                    assert sealed == fields["CT"] + fields["TAG"]
                    count += 1
                fields = {}
    assert count > 0


def _is_hex(text: str) -> bool:
    try:
        bytes.fromhex(text)
    except ValueError:
        return False
    return True


def wycheproof() -> list[dict[str, Any]]:
    if not WYCHEPROOF.exists():
        pytest.skip(f"Wycheproof's vectors are not beside this checkout ({WYCHEPROOF})")
    groups = json.loads(WYCHEPROOF.read_text())["testGroups"]
    sizes = {"keySize": 256, "ivSize": 96, "tagSize": 128}
    return [test for group in groups if sizes.items() <= group.items() for test in group["tests"]]


def test_wycheproof() -> None:
    tests = wycheproof()
    for test in tests:
        key, nonce, aad, plain, cipher, tag = (
            bytes.fromhex(test[name]) for name in ("key", "iv", "aad", "msg", "ct", "tag")
        )
        opened = _native.gpu_aead_open(key, nonce, aad, cipher + tag)
        if test["result"] == "valid":
            assert _native.gpu_aead_seal(key, nonce, aad, plain) == cipher + tag, test["tcId"]
            assert opened == plain, test["tcId"]
        else:
            assert opened is None, test["tcId"]
    assert len(tests) > 250


@pytest.mark.parametrize("size", EDGES)
def test_every_edge_of_a_part_and_of_a_block(size: int) -> None:
    key, nonce, associated = bytes(range(32)), bytes(range(12)), bytes(range(96))
    plain = bytes(i * 7 + i // 256 & 255 for i in range(size))
    sealed = ChaCha20Poly1305(key).encrypt(nonce, plain, associated)
    assert _native.gpu_aead_seal(key, nonce, associated, plain) == sealed
    assert _native.gpu_aead_open(key, nonce, associated, sealed) == plain


@settings(max_examples=60, deadline=None)
@given(
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=12, max_size=12),
    st.binary(max_size=130),
    st.binary(max_size=9000),
    st.integers(0, 1 << 20),
)
def test_agrees_with_openssl(key: bytes, nonce: bytes, ad: bytes, plain: bytes, spot: int) -> None:
    sealed = ChaCha20Poly1305(key).encrypt(nonce, plain, ad)
    assert _native.gpu_aead_seal(key, nonce, ad, plain) == sealed
    assert _native.gpu_aead_open(key, nonce, ad, sealed) == plain
    bad = bytearray(sealed)
    bad[spot % len(bad)] ^= 1 << spot % 8
    assert _native.gpu_aead_open(key, nonce, ad, bytes(bad)) is None
