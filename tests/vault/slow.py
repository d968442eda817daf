"""C2SP's chunked encryption a second time: slow, short, on nothing but `cryptography`'s calls.

What the native core writes must open here, and what is written here must open there.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA512
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

CHUNK, TAG, HEADER = 16384, 16, 56
CIPHERS: dict[str, type[AESGCM] | type[ChaCha20Poly1305]] = {
    "AEAD_AES_256_GCM": AESGCM,
    "AEAD_CHACHA20_POLY1305": ChaCha20Poly1305,
}


class Refused(Exception):
    """Its text is one of the words that a vector may expect."""


def _keys(key: bytes, suite: str, salt: bytes, context: bytes) -> tuple[bytes, int, bytes]:
    info = b"c2sp.org/chunked-encryption@v1+" + suite.encode() + b"\0" + salt + context
    out = HKDFExpand(SHA512(), 32 + 12 + 32, info).derive(key)
    return out[:32], int.from_bytes(out[32:44], "big"), out[44:]


def _nonce(base: int, number: int) -> bytes:
    return (base ^ number).to_bytes(12, "big")


def seal(key: bytes, suite: str, salt: bytes, context: bytes, plain: bytes) -> bytes:
    chunk_key, base, commitment = _keys(key, suite, salt, context)
    cipher = CIPHERS[suite](chunk_key)
    chunks = [plain[at : at + CHUNK] for at in range(0, len(plain) + 1, CHUNK)]
    assert len(chunks[-1]) < CHUNK
    sealed = [cipher.encrypt(_nonce(base, n), chunk, None) for n, chunk in enumerate(chunks)]
    return salt + commitment + b"".join(sealed)


def open_(key: bytes, suite: str, context: bytes, sealed: bytes) -> bytes:
    last = (len(sealed) - HEADER) % (CHUNK + TAG)
    if len(sealed) < HEADER or last < TAG:
        raise Refused("truncated")
    chunk_key, base, commitment = _keys(key, suite, sealed[:24], context)
    if commitment != sealed[24:HEADER]:
        raise Refused("wrong key")
    cipher = CIPHERS[suite](chunk_key)
    starts = range(HEADER, len(sealed), CHUNK + TAG)
    try:
        return b"".join(
            cipher.decrypt(_nonce(base, n), sealed[at : at + CHUNK + TAG], None)
            for n, at in enumerate(starts)
        )
    except InvalidTag:
        raise Refused("tampered") from None
