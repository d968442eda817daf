"""DSSE envelopes, signed with the key of a worker's certificate, or with an owner's key.

    {"payload": base64, "payloadType": ..., "signatures": [{"keyid", "sig", "certificate"}]}

`certificate` is the base64 of a PEM certificate, an addition that in-toto's go-witness makes to
DSSE; readers that do not know it ignore it. An owner's signature has none. The payload is not
looked at before the signature, and the certificate's issuer or the owner's key, have been checked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from sealring.errors import ConfigurationError, ForgedStatement, MalformedStatement, Unsupported
from sealring.formats.log.notes import decode_base64, encode_base64
from sealring.formats.log.tree import MAX_ENTRY_BYTES
from sealring.formats.strict import read_json, strictly
from sealring.identity.credentials import Credentials
from sealring.identity.loading import certificate_from_pem
from sealring.identity.verification import is_issued_by

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"


@dataclass(frozen=True, slots=True)
class _Signature:
    keyid: str
    sig: str


@dataclass(frozen=True, slots=True)
class _WorkerSignature:
    keyid: str
    sig: str
    certificate: str


@dataclass(frozen=True, slots=True)
class OpenedEnvelope:
    """A payload, and who signed it: the certificate of an authority's, or an owner's key."""

    payload: bytes
    signer: x509.Certificate | Ed25519PublicKey


def seal_envelope(payload: bytes, signer: Credentials | Ed25519PrivateKey) -> bytes:
    key = signer.private_key if isinstance(signer, Credentials) else signer
    if not isinstance(key, Ed25519PrivateKey):
        raise Unsupported("a statement is signed with an Ed25519 key, and this worker's is another")
    keyid = key_id(key.public_key())
    sig = encode_base64(key.sign(_pre_authentication(payload)))
    signature: _Signature | _WorkerSignature
    if isinstance(signer, Credentials):
        pem = signer.certificate.public_bytes(Encoding.PEM)
        signature = _WorkerSignature(keyid, sig, encode_base64(pem))
    else:
        signature = _Signature(keyid, sig)
    encoded = _spelled(encode_base64(payload), signature)
    if len(encoded) > MAX_ENTRY_BYTES:
        raise Unsupported(
            f"a signed statement has at most {MAX_ENTRY_BYTES} bytes, and this has {len(encoded)}: "
            "make one for a shorter interval"
        )
    return encoded


def open_envelope(
    data: bytes,
    authorities: Sequence[x509.Certificate],
    owners: Sequence[Ed25519PublicKey] = (),
) -> OpenedEnvelope:
    """Checks the certificate's issuer, or that an owner signed, and the signature.

    Dates are left to the caller.
    """
    payload, signature = _parse(data)
    signer: x509.Certificate | Ed25519PublicKey
    if isinstance(signature, _WorkerSignature):
        signer = _certificate(_decode(signature.certificate, "certificate"))
        if not is_issued_by(signer, tuple(authorities)):
            raise ForgedStatement("the statement's certificate is not of an authority to believe")
        key = signer.public_key()
    else:
        known = {key_id(owner): owner for owner in owners}
        if signature.keyid not in known:
            raise ForgedStatement("the statement is signed by a key that is not an owner's")
        key = signer = known[signature.keyid]
    if not isinstance(key, Ed25519PublicKey) or signature.keyid != key_id(key):
        raise ForgedStatement("the statement's keyid is not that of its certificate's Ed25519 key")
    try:
        key.verify(_decode(signature.sig, "sig"), _pre_authentication(payload))
    except InvalidSignature:
        raise ForgedStatement("the statement is not signed by the key that it names") from None
    return OpenedEnvelope(payload, signer)


def is_of_worker(data: bytes) -> bool:
    """Whether a worker's certificate comes with it; else an owner has signed. Checks the form."""
    return isinstance(_parse(data)[1], _WorkerSignature)


def read_statement(data: bytes) -> Any:
    """The JSON of an envelope or of its payload, or MalformedStatement."""
    try:
        return read_json(data, MAX_ENTRY_BYTES)
    except ValueError as problem:
        raise MalformedStatement(f"the statement is not JSON that can be used: {problem}") from None


def key_id(key: Ed25519PublicKey) -> str:
    """SHA-256 of the public key (SPKI), as a certificate's holder is named elsewhere."""
    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def _parse(data: bytes) -> tuple[bytes, _Signature | _WorkerSignature]:
    value = read_statement(data)
    if not isinstance(value, dict) or value.keys() != {"payload", "payloadType", "signatures"}:
        raise MalformedStatement("the statement is not a DSSE envelope with these three fields")
    if value["payloadType"] != PAYLOAD_TYPE:
        raise MalformedStatement(f"a statement's payloadType is {PAYLOAD_TYPE}")
    signatures = value["signatures"]
    if not isinstance(signatures, list) or len(signatures) != 1:
        raise MalformedStatement("a statement has exactly one signature")
    (one,) = signatures
    kind = _WorkerSignature if isinstance(one, dict) and "certificate" in one else _Signature
    try:
        signature: _Signature | _WorkerSignature
        signature = strictly(kind, one, "signature", "DSSE envelope")
        payload: str = strictly(str, value["payload"], "payload", "DSSE envelope")
    except ConfigurationError as problem:
        raise MalformedStatement(str(problem)) from None
    # Chains and logs name an envelope by its digest. In another spelling it would still verify, and
    # its signer would seem to have signed a second one.
    if _spelled(payload, signature) != data:
        raise MalformedStatement("the envelope is spelled in another way than sealring writes it")
    return _decode(payload, "payload"), signature


def _spelled(payload: str, signature: _Signature | _WorkerSignature) -> bytes:
    """The one spelling of an envelope. Nothing in it is escaped: all of it is hex or base64."""
    certificate = ""
    if isinstance(signature, _WorkerSignature):
        certificate = f',"certificate":"{signature.certificate}"'
    return (
        f'{{"payload":"{payload}","payloadType":"{PAYLOAD_TYPE}","signatures":'
        f'[{{"keyid":"{signature.keyid}","sig":"{signature.sig}"{certificate}}}]}}'
    ).encode()


@lru_cache(maxsize=1024)
def _certificate(pem: bytes) -> x509.Certificate:
    """Parsed once: many statements carry the same one."""
    refusal = MalformedStatement("the statement's certificate cannot be read")
    found = certificate_from_pem(pem, refusal)
    if found.public_bytes(Encoding.PEM) != pem:
        raise MalformedStatement("the statement's certificate has something beside it")
    return found


def _pre_authentication(payload: bytes) -> bytes:
    """DSSE's PAE: what is signed, so that type and payload cannot be cut differently."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def _decode(text: str, what: str) -> bytes:
    return decode_base64(text, f"the envelope's {what}", MalformedStatement)
