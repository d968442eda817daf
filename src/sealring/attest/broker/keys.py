"""The keys of one broker, all from its authority's, so that replicas with one DIR have the same.

Each purpose has a key of its own: a token can never be taken for a certificate, nor a nonce for
either.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from sealring.core.identity.authority import open_authority
from sealring.formats.log.broker_entries import broker_name, log_of_broker
from sealring.formats.log.notes import Kind, Signer

_SALT: Final = b"sealring-1 broker"


@dataclass(frozen=True, slots=True)
class BrokerKeys:
    """Printing it is safe."""

    authority: x509.Certificate
    authority_key: Ed25519PrivateKey = field(repr=False)
    nonce_key: bytes = field(repr=False)
    token_key: Ed25519PrivateKey = field(repr=False)
    audit_key: Signer
    """Signs the audit log's checkpoints, under the log's origin."""
    store_key: bytes = field(repr=False)
    """Authenticates the rows of the store."""

    @property
    def name(self) -> str:
        """Tells the brokers apart that share one etcd."""
        return broker_name(self.authority)


def open_broker_keys(directory: Path) -> BrokerKeys:
    authority, key = open_authority(directory)
    secret = key.private_bytes_raw()

    def derived(purpose: bytes) -> bytes:
        return HKDF(SHA256(), 32, _SALT, b"sealring-1 " + purpose).derive(secret)

    audit_key = Ed25519PrivateKey.from_private_bytes(derived(b"audit log"))
    return BrokerKeys(
        authority,
        key,
        derived(b"nonces"),
        Ed25519PrivateKey.from_private_bytes(derived(b"tokens")),
        Signer(log_of_broker(authority), Kind.NOTE, audit_key),
        derived(b"store"),
    )
