"""Files of signing keys, all Ed25519.

Owners, who sign what is made outside of a job, have PEM files. Logs and witnesses have the signer
and verifier keys of signed notes.
"""

from __future__ import annotations

import os
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

from sealring.core.identity.loading import public_key_from_pem
from sealring.core.identity.private_files import read_private, read_secret_file
from sealring.errors import ConfigurationError
from sealring.formats.files import read_public, write_private, write_public
from sealring.formats.log.notes import Signer


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


def read_signer(path: Path) -> Signer:
    """A signer key from a file that no other user can read."""
    content = read_private(path, "the signer key", ConfigurationError)
    return Signer.parse(content.decode("utf-8", "replace").strip())


def write_signer(path: Path, signer: Signer) -> None:
    write_private(path, (signer.encode() + "\n").encode())


def write_key_pair(path: Path, signer: Signer) -> Path:
    """A new signer key and its verifier key beside it, whose path is returned: NAME.vkey.

    Nothing is overwritten: only who could make the signer key writes the other one.
    """
    beside = path.with_name(f"{path.name.removesuffix('.key')}.vkey")
    if os.path.lexists(beside):
        raise ConfigurationError(
            f"{beside} is there already and will not be overwritten: move it away first"
        )
    write_signer(path, signer)
    write_public(beside, f"{signer.verifier.encode()}\n".encode())
    return beside
