"""The keys of one broker. All derive from its authority's key, so replicas with one DIR share them.

Each purpose has a key of its own, so a token can never be taken for a certificate, nor a nonce for
either.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID

from sealring.core.identity.authority import open_authority
from sealring.core.identity.certificates import issue, issue_leaf
from sealring.core.identity.loading import public_key_from_der
from sealring.core.identity.names import WorkerName, is_resource
from sealring.core.identity.process import read_private
from sealring.errors import BrokerError, BrokerRefusal, ConfigurationError
from sealring.formats.log.broker_entries import broker_name, log_of_broker
from sealring.formats.log.notes import SignatureKind, Signer

_SALT: Final = b"sealring-1 broker"


@dataclass(frozen=True, slots=True)
class BrokerKeys:
    """The keys of one broker. The repr leaves out the secret ones."""

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
        """The broker's name in the store. It differs between brokers that share one etcd."""
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
        Signer(log_of_broker(authority), SignatureKind.NOTE, audit_key),
        derived(b"store"),
    )


SERVER_DAYS: Final = 7


def issue_to_worker(
    keys: BrokerKeys,
    public_key: bytes,
    name: WorkerName,
    world: int,
    attestation: bytes,
    minutes: float,
    chain_until: datetime,
    now: datetime,
) -> x509.Certificate:
    """Issues a worker's certificate. It ends with the hardware's own chain, if that is sooner."""
    holder = public_key_from_der(public_key, ConfigurationError("the worker's key cannot be read"))
    assert isinstance(holder, Ed25519PublicKey)  # parse_attestation saw to it
    return issue(
        keys.authority,
        keys.authority_key,
        holder,
        name,
        world,
        min(timedelta(minutes=minutes), chain_until - now),
        now,
        attestation=attestation,
    )


def issue_to_self(
    keys: BrokerKeys, names: Sequence[str]
) -> tuple[x509.Certificate, Ed25519PrivateKey]:
    """Issues the broker's own TLS certificate, with its host names and no worker's name."""
    key = Ed25519PrivateKey.generate()
    certificate = issue_leaf(
        keys.authority,
        keys.authority_key,
        key.public_key(),
        [_general_name(name) for name in names],
        [ExtendedKeyUsageOID.SERVER_AUTH],
        timedelta(days=SERVER_DAYS),
        datetime.now(UTC),
    )
    return certificate, key


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return x509.DNSName(name.lower())
    except ValueError:
        raise ConfigurationError(f"--name {name!r} is not a host's name") from None


_LOG = logging.getLogger("sealring.attest.broker")


@dataclass(frozen=True, slots=True)
class DataKeys:
    directory: Path | None

    def check(self, paths: Iterable[str]) -> None:
        """Called at the start. Raises if a data key exists and cannot be used."""
        for path in paths:
            if self.directory is not None and (self.directory / path).exists():
                read_private(self.directory / path, "the data key", ConfigurationError)

    def read(self, path: str) -> bytes | BrokerError:
        """The data key, or why the broker cannot give it. Raises if `path` names no data key."""
        if not is_resource(path):
            raise BrokerRefusal("a resource is repository/type/tag", code="broker.no_such_resource")
        if self.directory is None or not (self.directory / path).exists():
            return BrokerRefusal(
                f"the policy grants {path}, and the broker does not have it",
                code="broker.no_such_resource",
            )
        try:
            return read_private(self.directory / path, "the data key", ConfigurationError)
        except ConfigurationError as problem:
            _LOG.error("%s", problem)
            # The worker is not told where the broker's files lie.
            said = str(problem).replace(str(self.directory / path), path)
            return BrokerError(
                f"the broker cannot use one of its files: {said}", code="broker.misconfigured"
            )
