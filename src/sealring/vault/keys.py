"""The keys that open a vault, and how the vault's own key is wrapped for each.

    a key file    a random key on this machine; AES key wrap (RFC 5649)
    a broker      a data key that a broker releases to workers whose evidence passes its policy;
                  AES key wrap
    a person      a public key; HPKE with ML-KEM-768 and X25519

The wrapping key is derived from a key file or data key, separately for each vault and each number
of the vault's key. It is stored nowhere. So a holder of the vault's key cannot compute what wraps
the next one, and a holder of an older key cannot pass it off as a newer one. A new key of the vault
is wrapped only for the secrets and public keys that are presented with the change. The public keys
in the header do not count: any holder could have exchanged them.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import (
    AEAD,
    KDF,
    KEM,
    MLKEM768X25519PrivateKey,
    MLKEM768X25519PublicKey,
    Suite,
)

from sealring import _native
from sealring.core.hooks import data_keys
from sealring.core.identity.names import is_resource
from sealring.core.identity.process import read_secret_file
from sealring.errors import BadCredential, ConfigurationError
from sealring.formats.files import write_private

KEY_BYTES: Final = 32
_SALT: Final = b"sealring vault 1"
_FILE: Final = re.compile(rb"sealring-key-1 ([0-9a-f]{64})\n?")
_IDENTITY: Final = re.compile(rb"sealring-identity-1 ([0-9a-f]{192})\n?")
_PUBLIC: Final = "sealring-person-1:"
_MLKEM_SEED, _MLKEM_PUBLIC, _X25519 = 64, 1184, 32
_HPKE: Final = Suite(KEM.MLKEM768_X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)


class Opener(Protocol):
    """A secret that opens a vault."""

    may_write: bool
    """Whether a header that this secret opens must be the work of a holder of the vault's key."""

    def unwrap(self, vault: bytes, number: int, grant: Grant) -> _native.Secret | None:
        """The vault's key with this number; None if the grant is not for this opener."""


class Holder(Protocol):
    """A key or person that can get a grant of a vault."""

    def has(self, grant: Grant, vault: bytes, number: int, key: _native.Secret) -> bool:
        """Whether the grant is for this holder."""

    def grant(self, name: str, vault: bytes, number: int, key: _native.Secret) -> Grant:
        """A grant that wraps the vault's key with this number for the holder."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The vault's key wrapped for one holder, as it stands in the header."""

    name: str
    kind: str
    """file, broker or person."""
    wrapped: str
    public: str
    """A person's public key; empty for other kinds."""
    resource: str
    """The broker's name for its data key; empty for other kinds."""


@dataclass(frozen=True, slots=True)
class SymmetricKey:
    """The secret of a key file, or a broker's data key."""

    kind: str
    resource: str
    secret: _native.Secret = field(repr=False)
    may_write = True

    def wrapping_key(self, vault: bytes, number: int) -> _native.Secret:
        return self.secret.derive(_SALT, b"wraps the key of " + _which(vault, number), KEY_BYTES)

    def unwrap(self, vault: bytes, number: int, grant: Grant) -> _native.Secret | None:
        if (grant.kind, grant.resource) != (self.kind, self.resource):
            return None
        return _native.unwrap_key(self.wrapping_key(vault, number), bytes.fromhex(grant.wrapped))

    def has(self, grant: Grant, vault: bytes, number: int, key: _native.Secret) -> bool:
        """Whether the grant gives this key of the vault to this holder."""
        found = self.unwrap(vault, number, grant)
        return found is not None and found == key

    def grant(self, name: str, vault: bytes, number: int, key: _native.Secret) -> Grant:
        wrapped = _native.wrap_key(self.wrapping_key(vault, number), key)
        return Grant(name, self.kind, wrapped.hex(), "", self.resource)


@dataclass(frozen=True, slots=True)
class Person:
    """A private key of a person or an organisation. This program only reads vaults with it.

    Anyone can wrap a key for a public key. So a header that opens only with a private key may be an
    attacker's, who would read everything sealed into that vault. The rule protects the person. It
    does not protect the vault: the person has its key, and another program could write with it.
    """

    secret: _native.Secret = field(repr=False)
    may_write = False

    def unwrap(self, vault: bytes, number: int, grant: Grant) -> _native.Secret | None:
        if grant.kind != "person":
            return None
        view = memoryview(self.secret)
        private = MLKEM768X25519PrivateKey(
            MLKEM768PrivateKey.from_seed_bytes(view[:_MLKEM_SEED]),
            X25519PrivateKey.from_private_bytes(view[_MLKEM_SEED:]),
        )
        try:
            return _native.Secret(
                _HPKE.decrypt(bytes.fromhex(grant.wrapped), private, _info(vault, number))
            )
        except (InvalidTag, ValueError):
            return None

    @property
    def public(self) -> str:
        view = memoryview(self.secret)
        first = MLKEM768PrivateKey.from_seed_bytes(view[:_MLKEM_SEED]).public_key()
        second = X25519PrivateKey.from_private_bytes(view[_MLKEM_SEED:]).public_key()
        raw = first.public_bytes_raw() + second.public_bytes_raw()
        return _PUBLIC + base64.urlsafe_b64encode(raw).decode()


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A person's public key, as `sealring vault identity` prints it."""

    text: str

    def __post_init__(self) -> None:
        _public_key(self.text)

    def has(self, grant: Grant, vault: bytes, number: int, key: _native.Secret) -> bool:
        """Whether the grant names this person. Only the person can tell which key it wraps."""
        if grant.kind != "person":
            return False
        try:
            # The same key can be written in several ways.
            return _public_bytes(grant.public) == _public_bytes(self.text)
        except ConfigurationError:
            return False

    def grant(self, name: str, vault: bytes, number: int, key: _native.Secret) -> Grant:
        wrapped = _HPKE.encrypt(memoryview(key), _public_key(self.text), _info(vault, number))
        return Grant(name, "person", wrapped.hex(), self.text, "")


Presented = SymmetricKey | PublicKey
"""A holder that is presented with a change of the vault's key, and so gets the new key."""


def key_file(path: Path) -> SymmetricKey:
    """Reads a key file, which must have mode 0600, to open a vault with."""
    return SymmetricKey("file", "", _read(path, "the key file", _FILE, "vault init"))


def make_key_file(path: Path) -> None:
    """Writes a new random key to a new file of mode 0600. Overwrites nothing."""
    _write(path, b"sealring-key-1 ", _native.Secret.random(KEY_BYTES))


def bad_key_file(problem: str) -> BadCredential:
    return BadCredential(problem, code="configuration.bad_key_file")


def broker_key(resource: str, data: _native.Secret) -> SymmetricKey:
    """A broker's data key as an opener; the data is from the broker or from the broker's file."""
    if not is_resource(resource):
        raise ConfigurationError(f"{resource!r} is no resource of a broker: REPOSITORY/TYPE/TAG")
    if len(data) < KEY_BYTES:
        raise bad_key_file(
            f"the data key {resource} has {len(data)} bytes; it needs {KEY_BYTES} random ones: "
            f"make one with `umask 077; openssl rand {KEY_BYTES} > FILE`"
        )
    return SymmetricKey("broker", resource, data)


def released_key(resource: str) -> SymmetricKey:
    """Asks the broker for a data key to open a vault with. The broker must admit this worker."""
    return broker_key(resource, _native.Secret(data_keys.one()(resource)))


def identity(path: Path) -> Person:
    """Reads a person's private key from a file, to read a vault with."""
    return Person(_read(path, "the identity", _IDENTITY, "vault identity"))


def make_identity(path: Path) -> Person:
    secret = _native.Secret.random(_MLKEM_SEED + _X25519)
    _write(path, b"sealring-identity-1 ", secret)
    return Person(secret)


def _public_key(text: str) -> MLKEM768X25519PublicKey:
    raw = _public_bytes(text)
    try:
        return MLKEM768X25519PublicKey(
            MLKEM768PublicKey.from_public_bytes(raw[:_MLKEM_PUBLIC]),
            X25519PublicKey.from_public_bytes(raw[_MLKEM_PUBLIC:]),
        )
    except ValueError:
        raise _no_public_key(text) from None


def _public_bytes(text: str) -> bytes:
    try:
        raw = base64.b64decode(text.removeprefix(_PUBLIC), b"-_", validate=True)
        if not text.startswith(_PUBLIC) or len(raw) != _MLKEM_PUBLIC + _X25519:
            raise ValueError
        return raw
    except (ValueError, binascii.Error):
        raise _no_public_key(text) from None


def _no_public_key(text: str) -> ConfigurationError:
    return ConfigurationError(
        f"{text[:40]!r} is no person's public key: `sealring vault identity FILE` prints one"
    )


def _which(vault: bytes, number: int) -> bytes:
    return vault + number.to_bytes(8, "big")


def _info(vault: bytes, number: int) -> bytes:
    return _SALT + b" for a person" + _which(vault, number)


def _read(path: Path, what: str, form: re.Pattern[bytes], maker: str) -> _native.Secret:
    content = read_secret_file(path, what, bad_key_file)
    found = form.fullmatch(memoryview(content))
    if found is None:
        raise bad_key_file(f"{what} {path} is not one that `sealring {maker}` makes")
    start, end = found.span(1)
    return _native.Secret.from_hex(content.part(start, end - start))


def _write(path: Path, prefix: bytes, secret: _native.Secret) -> None:
    text = bytearray(prefix + bytes(2 * len(secret)) + b"\n")
    with memoryview(text) as view:
        secret.write_hex(view[len(prefix) : -1])
    try:
        write_private(path, text)
    finally:
        _native.erase(text)
