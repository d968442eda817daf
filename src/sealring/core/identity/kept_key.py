"""Keeps a worker's private key between two uses in the protected memory for keys."""

from __future__ import annotations

from typing import Final, TypeAlias

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_der_private_key,
)

from sealring import _native
from sealring.limits import KEY_BYTES

PrivateKey: TypeAlias = (
    Ed25519PrivateKey | Ed448PrivateKey | EllipticCurvePrivateKey | RSAPrivateKey
)
_ED25519: Final = bytes.fromhex("302e020100300506032b657004220420")
"""The bytes before the seed in an Ed25519 key's PKCS #8 form (RFC 8410, section 7)."""


def _der(tag: int, content: bytes) -> bytes:
    return bytes([tag, 0x82]) + len(content).to_bytes(2, "big") + content


_FILLING: Final = _der(0x04, bytes(1100))
_ATTRIBUTES: Final = _der(0xA0, _der(0x30, bytes.fromhex("06026901") + _der(0x31, _FILLING)))
"""An attribute 2.25.1 of zeros. PKCS #8 allows it after the key, and readers ignore it."""


class KeptKey:
    """A private key. OpenSSL has a copy of it only while an object returned by `load` lives."""

    __slots__ = ("pkcs8",)

    def __init__(self, pkcs8: _native.Secret) -> None:
        self.pkcs8 = pkcs8

    @classmethod
    def of(cls, key: PrivateKey) -> KeptKey:
        encoded = (Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
        return cls(_native.Secret.moved(key.private_bytes(*encoded)))

    @classmethod
    def of_seed(cls, seed: _native.Secret) -> KeptKey:
        """An Ed25519 key from its seed, without giving it to OpenSSL."""
        pkcs8 = _native.Secret.zeros(len(_ED25519) + KEY_BYTES)
        with memoryview(pkcs8) as room, memoryview(seed) as given:
            room[: len(_ED25519)] = _ED25519
            room[len(_ED25519) :] = given
        return cls(pkcs8)

    def enlarged(self) -> _native.Secret:
        """The key as PKCS #8, padded to more than 1 KiB.

        OpenSSL frees its copy without overwriting it. glibc can be told to overwrite freed memory,
        but does so only for larger blocks: see `_native.FreedMemoryOverwritten`.
        """
        with memoryview(self.pkcs8) as whole:
            start = 2 if whole[1] < 0x80 else 2 + (whole[1] & 0x7F)
            size = len(whole) - start
            header = _der(0x30, b"")[:2] + (size + len(_ATTRIBUTES)).to_bytes(2, "big")
            made = _native.Secret.zeros(len(header) + size + len(_ATTRIBUTES))
            with memoryview(made) as room:
                room[:4], room[4 : 4 + size], room[4 + size :] = header, whole[start:], _ATTRIBUTES
        return made

    def load(self) -> PrivateKey:
        """Loads the key for one use. Do not keep the result: its memory is not protected."""
        # A stranger's connection can cause this call. RSA's checks would take a second, and the
        # key was checked when it was first read.
        key = load_der_private_key(
            memoryview(self.pkcs8), password=None, unsafe_skip_rsa_key_validation=True
        )
        assert isinstance(key, PrivateKey)
        return key


# ---- buffers and keys that are overwritten after use

# Classes: every set-up message passes through several, and a generator takes five times as long.


class Erased:
    """Gives the buffer, and overwrites it at the end of the block."""

    __slots__ = ("_raw",)

    def __init__(self, raw: bytearray) -> None:
        self._raw = raw

    def __enter__(self) -> bytearray:
        return self._raw

    def __exit__(self, *_: object) -> None:
        _native.erase(self._raw)


class Wiped:
    """Wipes the key at the end of the block, even if other references to it remain."""

    __slots__ = ("_key",)

    def __init__(self, key: _native.Secret) -> None:
        self._key = key

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._key.wipe()
