"""The sealed store's vector in docs/spec.md, computed by pyca/cryptography and by sealring."""

from __future__ import annotations

import hmac
import re
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from sealring import _native
from sealring.core.identity.secret import derive_store_key
from sealring.core.store.values import Kind, StoreKeys, parse_parts

SPEC = Path(__file__).parents[3] / "docs" / "spec.md"


@pytest.fixture(scope="module")
def vector() -> dict[str, str]:
    pattern = r"^(secret-text|stored-[a-z-]+)\s*=\s*(\S+)$"
    return dict(re.findall(pattern, SPEC.read_text(), re.MULTILINE))


def fields(*values: bytes) -> bytes:
    return b"".join(len(value).to_bytes(4, "big") + value for value in values)


def hkdf(key: bytes, salt: bytes, info: bytes) -> bytes:
    return HKDF(SHA256(), 32, salt, info).derive(key)


def test_as_the_text_says(vector: dict[str, str]) -> None:
    secret = vector["secret-text"].encode()
    key = hkdf(secret, b"sealring-1 job secret", b"sealring-1 store key")
    assert key.hex() == vector["stored-store-key"]
    context = fields(b"demo", b"worker", b"run-1", b"0")
    names, counters, values = (
        hkdf(key, b"sealring-1 store", fields(purpose, context))
        for purpose in (b"names", b"counters", b"values")
    )
    assert names.hex() == vector["stored-name-key"]
    assert counters.hex() == vector["stored-counter-key"]
    assert values.hex() == vector["stored-value-key"]
    name = hmac.digest(names, b"address/0", "sha256").hex()
    assert name == vector["stored-value-name"]
    counter = hmac.digest(counters, b"address/0", "sha256").hex()
    assert counter == vector["stored-counter-name"]
    salt, part = bytes.fromhex(vector["stored-salt"]), bytes.fromhex(vector["stored-part"])
    writer, number = bytes(range(16)), (7).to_bytes(8, "big")
    header = b"SV\x01\x01" + (5).to_bytes(4, "big") + writer + number + salt
    part_key = hkdf(values, salt, fields(b"sealring-1 store value", name.encode()))
    assert part == header + AESGCM(part_key).encrypt(bytes(12), b"hello", header)


def test_as_the_code_does(vector: dict[str, str]) -> None:
    key = derive_store_key(_native.Secret(vector["secret-text"].encode()))
    keys = StoreKeys.derive(key, ["demo", "worker", "run-1", "0"])
    name = keys.value_name("address/0")
    assert name == vector["stored-value-name"]
    assert keys.counter_name("address/0") == vector["stored-counter-name"]
    (part,) = parse_parts(bytes.fromhex(vector["stored-part"]))
    assert (part.kind, part.number, part.salt.hex()) == (Kind.VALUE, 7, vector["stored-salt"])
    assert keys.open(part, name) == b"hello"
