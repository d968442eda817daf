"""Keys of owners, who sign what is made outside of a job: Ed25519, as PEM files."""

from __future__ import annotations

from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from sealring.errors import ConfigurationError
from sealring.formats.files import read_public, write_private, write_public
from sealring.identity.loading import public_key_from_pem
from sealring.identity.private_files import read_secret_file


def create_owner(path: Path) -> Path:
    """Writes a new key (mode 0600), and its public half to `path`.pub, which it returns."""
    key = Ed25519PrivateKey.generate()
    write_private(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public = path.with_name(f"{path.name}.pub")
    spki = PublicFormat.SubjectPublicKeyInfo
    write_public(public, key.public_key().public_bytes(Encoding.PEM, spki))
    return public


def read_owner_key(path: Path) -> Ed25519PrivateKey:
    content = read_secret_file(path, "the owner's key", ConfigurationError)
    try:
        key = load_pem_private_key(memoryview(content), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigurationError(f"{path} is not an unencrypted PEM file of an Ed25519 key")
    return key


def read_owner(path: Path) -> Ed25519PublicKey:
    content = read_public(path, "the owner's public key", ConfigurationError)
    refusal = ConfigurationError(f"{path} is not a PEM file of an Ed25519 public key")
    key = public_key_from_pem(content, refusal)
    if not isinstance(key, Ed25519PublicKey):
        raise refusal
    return key
