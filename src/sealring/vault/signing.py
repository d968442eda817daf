"""Statements that a worker signs with the key of its certificate.

A statement is JSON text. The signature covers the same bytes that are read. A checkpoint outlives
its job's certificates, so a certificate must be valid at the time that the statement itself names.
A thief of an expired key can date a statement back, but needs the vault's key as well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding

from sealring.core.hooks import credentials_of as credentials_of
from sealring.core.identity import Credentials, verify
from sealring.core.identity.loading import certificate_from_pem
from sealring.errors import HandshakeError, VaultError, named
from sealring.formats import signed as signatures
from sealring.formats.strict import read_json

FIELDS: Final = frozenset({"job", "rank", "world", "time"})
"""The fields of every statement."""
_PURPOSE: Final = b"sealring vault 1 statement\0"


@dataclass(frozen=True, slots=True)
class Signed:
    statement: str
    certificate: str
    signature: str


@dataclass(frozen=True, slots=True)
class Signer:
    """Proof that a worker of the job signed a statement. Only `check` makes this object."""

    rank: int
    world: int
    document: dict[str, Any]


def sign(credentials: Credentials, world: int, document: dict[str, Any]) -> Signed:
    named = {
        "job": credentials.job,
        "rank": credentials.rank,
        "world": world,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    statement = json.dumps(named | document)
    signature = signatures.sign(credentials.private_key, _PURPOSE + statement.encode())
    pem = credentials.certificate.public_bytes(Encoding.PEM).decode()
    return Signed(statement, pem, signature.hex())


def unadmitted(problem: str) -> VaultError:
    return VaultError(problem, code="vault.unadmitted_signer")


def check(signed: Signed, authorities: Sequence[x509.Certificate], job: str, where: str) -> Signer:
    """Returns what the statement says if a worker of this job signed it; else VaultError."""
    try:
        certificate = certificate_from_pem(signed.certificate.encode(), ValueError())
        data, signature = _PURPOSE + signed.statement.encode(), bytes.fromhex(signed.signature)
        signatures.check_signature(certificate.public_key(), signature, data)
        document = read_json(signed.statement.encode())
        rank, world, when = document["rank"], document["world"], document["time"]
        moment = datetime.fromisoformat(when)
        if type(rank) is not int or type(world) is not int or moment.tzinfo is None:
            raise TypeError
    except (ValueError, KeyError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        raise unadmitted(
            f"{where} has a signature that is not over what it says: it was forged or damaged"
        ) from None
    try:
        verify(certificate, authorities, job=job, world=world, rank=rank, where=where, now=moment)
    except HandshakeError as problem:
        raise unadmitted(
            f"{where} was signed by a worker that this job does not admit: "
            f"{named(problem)}: {problem}"
        ) from None
    return Signer(rank, world, document)
