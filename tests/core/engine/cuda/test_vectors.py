"""The GPU's ChaCha20-Poly1305, compiled for the CPU, against the official vectors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import cryptography_vectors
import pytest
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from hypothesis import given, settings
from hypothesis import strategies as st

from sealring import _stand_ins
from tests.core.engine.wycheproof import check_against

RFC = Path(cryptography_vectors.__file__).parent / "ciphers" / "ChaCha20Poly1305"
EDGES = (0, 1, 15, 16, 17, 63, 64, 65, 8191, 8192, 65535, 65536, 65537, 131072 + 63, 262144)


def test_rfc_8439_section_2_8_2() -> None:
    key = bytes(range(0x80, 0xA0))
    nonce = bytes.fromhex("070000004041424344454647")
    associated = bytes.fromhex("50515253c0c1c2c3c4c5c6c7")
    plain = (
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the "
        b"future, sunscreen would be it."
    )
    sealed = _stand_ins.gpu_aead_seal(key, nonce, associated, plain)
    assert sealed[-16:].hex() == "1ae10b594f09e26a7e902ecbd0600691"
    assert sealed[:8].hex() == "d31a8d34648e60db"
    assert _stand_ins.gpu_aead_open(key, nonce, associated, sealed) == plain


def vectors_of(name: str, equals: str) -> Iterator[dict[str, bytes]]:
    """Blocks of `field = value` lines, by the fields' upper-case names: hex, or text in quotes."""
    for block in (RFC / name).read_text().split("\n\n"):
        fields = {}
        for line in block.splitlines():
            field, found, value = line.partition(equals)
            if found and not line.startswith("#") and field.strip() != "COUNT":
                field, value = field.strip().upper(), value.strip()
                text = field == "RESULT" or value.startswith('"')
                fields[field] = value.strip('"').encode() if text else bytes.fromhex(value)
        if fields:
            yield fields


def test_openssl_vectors() -> None:
    """They include RFC 8439's of appendix A.5. Those with another nonce length are left out."""
    opened = refused = 0
    for vector in vectors_of("openssl.txt", "="):
        key, nonce, associated = vector["KEY"], vector["IV"], vector["AAD"]
        if len(nonce) != 12:
            continue
        sealed = vector["CIPHERTEXT"] + vector["TAG"]
        plain = _stand_ins.gpu_aead_open(key, nonce, associated, sealed)
        if "RESULT" in vector:
            assert plain is None
            refused += 1
        else:
            assert plain == vector["PLAINTEXT"]
            assert _stand_ins.gpu_aead_seal(key, nonce, associated, plain) == sealed
            opened += 1
    assert (opened, refused) == (4, 1)


def test_boringssl_vectors() -> None:
    """They include RFC 8439's of section 2.8.2 and appendix A.5, and every length of padding."""
    count = 0
    for vector in vectors_of("boringssl.txt", "="):
        key, nonce, associated = vector["KEY"], vector["NONCE"], vector["AD"]
        sealed = vector["CT"] + vector["TAG"]
        assert _stand_ins.gpu_aead_seal(key, nonce, associated, vector["IN"]) == sealed
        assert _stand_ins.gpu_aead_open(key, nonce, associated, sealed) == vector["IN"]
        for at in range(len(sealed)):
            forged = sealed[:at] + bytes([sealed[at] ^ 0x80]) + sealed[at + 1 :]
            assert _stand_ins.gpu_aead_open(key, nonce, associated, forged) is None
        count += 1
    assert count == 66


def test_wycheproof() -> None:
    name = "chacha20_poly1305_test.json"
    assert check_against(name, _stand_ins.gpu_aead_seal, _stand_ins.gpu_aead_open) > 250


@pytest.mark.parametrize("size", EDGES)
def test_every_edge_of_a_part_and_of_a_block(size: int) -> None:
    key, nonce, associated = bytes(range(32)), bytes(range(12)), bytes(range(96))
    plain = bytes(i * 7 + i // 256 & 255 for i in range(size))
    sealed = ChaCha20Poly1305(key).encrypt(nonce, plain, associated)
    assert _stand_ins.gpu_aead_seal(key, nonce, associated, plain) == sealed
    assert _stand_ins.gpu_aead_open(key, nonce, associated, sealed) == plain


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
    assert _stand_ins.gpu_aead_seal(key, nonce, ad, plain) == sealed
    assert _stand_ins.gpu_aead_open(key, nonce, ad, sealed) == plain
    bad = bytearray(sealed)
    bad[spot % len(bad)] ^= 1 << spot % 8
    assert _stand_ins.gpu_aead_open(key, nonce, ad, bytes(bad)) is None
