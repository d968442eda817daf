"""Signed statements: signatures with any kind of key, and DSSE envelopes.

    {"payload": base64, "payloadType": ..., "signatures": [{"keyid", "sig", "certificate"}]}

`certificate` is the base64 of a worker's PEM certificate. in-toto's go-witness adds this field to
DSSE; readers that do not know it ignore it. An owner's signature has none. The caller decides whose
certificate or key is trusted.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PrivateKey, Ed448PublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from sealring.errors import ForgedStatement, MalformedStatement, Unsupported
from sealring.formats.log.tree import MAX_ENTRY_BYTES
from sealring.formats.strict import decode_base64, encode_base64, read_json, strictly

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
_PSS: Final = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH)

PrivateKey = Ed25519PrivateKey | Ed448PrivateKey | ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


def sign(key: PrivateKey, data: bytes) -> bytes:
    """Signs with Ed25519 or Ed448, ECDSA with SHA-256, or RSA-PSS with SHA-256."""
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(data, ec.ECDSA(hashes.SHA256()))
    if isinstance(key, rsa.RSAPrivateKey):
        return key.sign(data, _PSS, hashes.SHA256())
    return key.sign(data)


def check_signature(key: PublicKeyTypes, signature: bytes, data: bytes) -> None:
    """Raises InvalidSignature, or UnsupportedAlgorithm for a kind of key that is not used here."""
    if isinstance(key, Ed25519PublicKey | Ed448PublicKey):
        key.verify(signature, data)
    elif isinstance(key, ec.EllipticCurvePublicKey):
        key.verify(signature, data, ec.ECDSA(hashes.SHA256()))
    elif isinstance(key, rsa.RSAPublicKey):
        key.verify(signature, data, _PSS, hashes.SHA256())
    else:
        raise UnsupportedAlgorithm("no key that signs statements")


@dataclass(frozen=True, slots=True)
class Envelope:
    """An envelope as read. Its signature is not checked yet."""

    payload: bytes
    keyid: str
    signature: bytes
    certificate: bytes | None
    """PEM. None for an owner's signature."""

    def check(self, key: PublicKeyTypes) -> None:
        """Raises ForgedStatement unless this key signed. Only Ed25519 keys sign envelopes.

        With ECDSA, anybody could make a second signature of the same payload, and so a second
        envelope.
        """
        if not isinstance(key, Ed25519PublicKey) or self.keyid != key_id(key):
            raise ForgedStatement(
                "the statement's keyid is not that of its certificate's Ed25519 key"
            )
        try:
            check_signature(key, self.signature, _pre_authentication(self.payload))
        except InvalidSignature:
            raise ForgedStatement("the statement is not signed by the key that it names") from None


@dataclass(frozen=True, slots=True)
class _Signature:
    keyid: str
    sig: str
    certificate: str | None


def seal_envelope(payload: bytes, key: PrivateKey, certificate: bytes | None = None) -> bytes:
    """Signs a payload. `certificate` is the PEM of a worker's certificate for the key."""
    if not isinstance(key, Ed25519PrivateKey):
        raise Unsupported("a statement is signed with an Ed25519 key, and this worker's is another")
    signature = _Signature(
        key_id(key.public_key()),
        encode_base64(sign(key, _pre_authentication(payload))),
        None if certificate is None else encode_base64(certificate),
    )
    encoded = _spelled(encode_base64(payload), signature)
    if len(encoded) > MAX_ENTRY_BYTES:
        raise Unsupported(
            f"a signed statement has at most {MAX_ENTRY_BYTES} bytes, and this has {len(encoded)}: "
            "make one for a shorter interval"
        )
    return encoded


def parse_envelope(data: bytes) -> Envelope:
    value = read_statement(data)
    if not isinstance(value, dict) or value.keys() != {"payload", "payloadType", "signatures"}:
        raise MalformedStatement("the statement is not a DSSE envelope with these three fields")
    if value["payloadType"] != PAYLOAD_TYPE:
        raise MalformedStatement(f"a statement's payloadType is {PAYLOAD_TYPE}")
    match value["signatures"]:
        case [dict() as one]:
            pass
        case _:
            raise MalformedStatement("a statement has exactly one signature")
    kind, error = "DSSE envelope", MalformedStatement
    signature = strictly(_Signature, {"certificate": None, **one}, "signature", kind, error)
    payload = strictly(str, value["payload"], "payload", kind, error)
    # Chains and logs name an envelope by its digest. With another spelling it would still verify,
    # and its signer would seem to have signed a second one.
    if _spelled(payload, signature) != data:
        raise MalformedStatement("the envelope is spelled in another way than sealring writes it")
    certificate = signature.certificate
    return Envelope(
        _decode(payload, "payload"),
        signature.keyid,
        _decode(signature.sig, "sig"),
        None if certificate is None else _decode(certificate, "certificate"),
    )


def read_statement(data: bytes) -> Any:
    """The JSON of an envelope or of its payload. Raises MalformedStatement if it is not JSON."""
    try:
        return read_json(data, MAX_ENTRY_BYTES)
    except ValueError as problem:
        raise MalformedStatement(f"the statement is not JSON that can be used: {problem}") from None


def key_id(key: Ed25519PublicKey) -> str:
    """SHA-256 of the public key (SPKI). A broker names a certificate's holder by it too."""
    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def _spelled(payload: str, signature: _Signature) -> bytes:
    """The one spelling of an envelope. All values are hex or base64, so nothing is escaped."""
    certificate = ""
    if signature.certificate is not None:
        certificate = f',"certificate":"{signature.certificate}"'
    return (
        f'{{"payload":"{payload}","payloadType":"{PAYLOAD_TYPE}","signatures":'
        f'[{{"keyid":"{signature.keyid}","sig":"{signature.sig}"{certificate}}}]}}'
    ).encode()


def _pre_authentication(payload: bytes) -> bytes:
    """DSSE's PAE, which is what is signed: type and payload cannot be split differently."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def _decode(text: str, what: str) -> bytes:
    return decode_base64(text, f"the envelope's {what}", MalformedStatement)
