"""Envelopes that sealring writes pass the verifier of another project (securesystemslib)."""

from __future__ import annotations

import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer._key import SSlibKey

from sealring.formats.signed import key_id
from sealring.record.statements.signing import sign_statement
from tests.record.statements.test_statements import interval, transformation, worker


def key_of(public: Ed25519PublicKey) -> SSlibKey:
    value = {"public": public.public_bytes_raw().hex()}
    return SSlibKey(key_id(public), "ed25519", "ed25519", value)


def read(envelope: bytes) -> Envelope:
    """Read DSSE's own fields. `certificate` is an addition that other readers ignore."""
    return Envelope.from_dict(json.loads(envelope))


def test_a_workers_statement_and_an_owners_are_accepted() -> None:
    credentials, owner = worker(), Ed25519PrivateKey.generate()
    signed = sign_statement(interval(), credentials), sign_statement(transformation(), owner)
    public = credentials.certificate.public_key()
    assert isinstance(public, Ed25519PublicKey)
    for envelope, key in zip(signed, (public, owner.public_key()), strict=True):
        accepted = read(envelope).verify([key_of(key)], 1)
        assert list(accepted) == [key_id(key)]


def test_a_changed_payload_and_another_key_are_refused() -> None:
    owner = Ed25519PrivateKey.generate()
    envelope = read(sign_statement(transformation(), owner))
    with pytest.raises(VerificationError):
        envelope.verify([key_of(Ed25519PrivateKey.generate().public_key())], 1)
    envelope.payload = envelope.payload.replace(b"tokenise", b"tokenize")
    with pytest.raises(VerificationError):
        envelope.verify([key_of(owner.public_key())], 1)
