"""Official vectors through the native core: NIST and Wycheproof AES-256-GCM, and the ratchet."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cryptography_vectors
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from sealring import _native
from tests.core.engine.wycheproof import check_against

ROOT = Path(__file__).parents[3]
NIST = Path(cryptography_vectors.__file__).parent / "ciphers" / "AES" / "GCM"
RATCHET_INFO = b"sealring 1 ratchet"
OURS = {"Keylen": "256", "IVlen": "96", "Taglen": "128"}


def nist(name: str) -> Iterator[dict[str, Any]]:
    """The file's vectors with our sizes of key, nonce and tag. PT is None where opening must
    fail."""
    sizes: dict[str, str] = {}
    for block in (NIST / name).read_text().split("\n\n"):
        vector: dict[str, Any] = {}
        for line in filter(None, block.splitlines()):
            field, equals, value = (part.strip() for part in line.strip("[]").partition("="))
            if line.startswith("["):
                sizes[field] = value
            elif line == "FAIL":
                vector["PT"] = None
            elif equals and field != "Count":
                vector[field] = bytes.fromhex(value)
        if "Key" in vector and OURS.items() <= sizes.items():
            yield vector


@pytest.mark.threat("K17")
def test_nist_encryption() -> None:
    count = 0
    for vector in nist("gcmEncryptExtIV256.rsp"):
        sealed = _native.aead_seal(vector["Key"], vector["IV"], vector["AAD"], vector["PT"])
        assert sealed == vector["CT"] + vector["Tag"]
        count += 1
    assert count == 375


@pytest.mark.threat("K17")
def test_nist_decryption() -> None:
    opened = refused = 0
    for vector in nist("gcmDecrypt256.rsp"):
        sealed = vector["CT"] + vector["Tag"]
        plain = _native.aead_open(vector["Key"], vector["IV"], vector["AAD"], sealed)
        assert plain == vector["PT"]
        opened += plain is not None
        refused += plain is None
    assert opened + refused == 375
    assert refused > 100


def test_wycheproof() -> None:
    assert check_against("aes_gcm_test.json", _native.aead_seal, _native.aead_open) > 50


def test_sizes_other_than_ours_are_refused() -> None:
    key, nonce = bytes(32), bytes(12)
    for bad_key in (b"", bytes(16), bytes(31), bytes(33)):
        with pytest.raises(ValueError, match="key must have 32 bytes"):
            _native.aead_seal(bad_key, nonce, b"", b"")
    for bad_nonce in (b"", bytes(8), bytes(11), bytes(13), bytes(16)):
        with pytest.raises(ValueError, match="nonce must have 12 bytes"):
            _native.aead_open(key, bad_nonce, b"", bytes(16))
    for size in range(16):
        assert _native.aead_open(key, nonce, b"", bytes(size)) is None


def test_ratchet_is_hkdf_expand() -> None:
    ours = theirs = bytes(range(32))
    for _ in range(50):
        ours = _native.ratchet(ours)
        theirs = HKDFExpand(hashes.SHA256(), 32, RATCHET_INFO).derive(theirs)
        assert ours == theirs


def test_the_vectors_are_installed_with_what_they_test() -> None:
    """The tests above then run wherever the suite does. Only Wycheproof's vectors may be
    missing."""
    pinned = (ROOT / "constraints.txt").read_text()
    versions = re.findall(r"^cryptography(?:_vectors)?==(\S+)", pinned, re.MULTILINE)
    assert len(versions) == 2
    assert len(set(versions)) == 1
    assert cryptography_vectors.__version__ == versions[0]
