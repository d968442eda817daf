"""Writes the vectors: python -m tests.vault.vectors.make."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from tests.vault.slow import CHUNK, CIPHERS, HEADER, TAG, seal

HERE = Path(__file__).parent
KEY = hashlib.sha256(b"sealring vectors: key").digest()
OTHER_KEY = hashlib.sha256(b"sealring vectors: other key").digest()
SALT = hashlib.sha256(b"sealring vectors: salt").digest()[:24]
CONTEXT = b"sealring vectors"
SHORT = {"AEAD_AES_256_GCM": "aes", "AEAD_CHACHA20_POLY1305": "chacha"}
Case = tuple[str, str, str, str, bytes, bytes, bytes]
"""File, what is expected, comment, suite, key, context, bytes."""


def plain(size: int) -> bytes:
    return hashlib.shake_256(b"sealring vectors: plaintext").digest(size)


def flipped(sealed: bytes, at: int) -> bytes:
    return sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :]


def cases() -> Iterator[Case]:
    for suite in CIPHERS:
        for name, size in [("empty", 0), ("short", 100), ("full-chunk", CHUNK), ("two", CHUNK + 9)]:
            sealed = seal(KEY, suite, SALT, CONTEXT, plain(size))
            comment = f"{size} bytes of plaintext"
            yield f"{SHORT[suite]}-{name}", "success", comment, suite, KEY, CONTEXT, sealed
        yield from refused(suite)


def refused(suite: str) -> Iterator[Case]:
    one = seal(KEY, suite, SALT, CONTEXT, plain(100))
    two = seal(KEY, suite, SALT, CONTEXT, plain(CHUNK + 9))
    full = CHUNK + TAG
    swapped = two[:HEADER] + two[HEADER + full :] + two[HEADER : HEADER + full]
    for name, expect, comment, key, context, sealed in [
        ("nothing", "truncated", "no bytes at all", KEY, CONTEXT, b""),
        ("no-chunk", "truncated", "a header alone", KEY, CONTEXT, one[:HEADER]),
        ("half-a-tag", "truncated", "cut inside the only tag", KEY, CONTEXT, one[: HEADER + 15]),
        ("cut", "tampered", "the last byte is missing", KEY, CONTEXT, one[:-1]),
        ("extended", "tampered", "one byte was appended", KEY, CONTEXT, one + b"\0"),
        ("cut-between-chunks", "truncated", "ends with a full chunk", KEY, CONTEXT,
         two[: HEADER + full]),
        ("swapped", "tampered", "two chunks change places", KEY, CONTEXT, swapped),
        ("wrong-key", "wrong key", "opened with another key", OTHER_KEY, CONTEXT, one),
        ("wrong-context", "wrong key", "opened as something else", KEY, b"another", one),
        ("salt", "wrong key", "a bit of the salt differs", KEY, CONTEXT, flipped(one, 0)),
        ("commitment", "wrong key", "a bit of the commitment differs", KEY, CONTEXT,
         flipped(one, 55)),
        ("ciphertext", "tampered", "a bit of the ciphertext differs", KEY, CONTEXT,
         flipped(one, 60)),
        ("tag", "tampered", "a bit of the tag differs", KEY, CONTEXT, flipped(one, len(one) - 1)),
    ]:  # fmt: skip
        yield f"{SHORT[suite]}-{name}", expect, comment, suite, key, context, sealed


def written(case: Case) -> bytes:
    _, expect, comment, suite, key, context, sealed = case
    lines = {"expect": expect, "aead": suite, "key": key.hex(), "context": context.hex()}
    if expect == "success":
        size = len(sealed) - HEADER
        lines["payload"] = hashlib.sha256(
            plain(size - (size // (CHUNK + TAG) + 1) * TAG)
        ).hexdigest()
    lines["comment"] = comment
    header = "".join(f"{name}: {value}\n" for name, value in lines.items())
    return header.encode() + b"\n" + sealed


if __name__ == "__main__":
    for case in cases():
        (HERE / f"{case[0]}.vector").write_bytes(written(case))
