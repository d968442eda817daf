"""What each member says of itself when a group forms; the transcript over all of it; signatures.

A statement passes through other members on its way, so it proves nothing by itself. What proves it
is its author's signature over the transcript, which has every statement in it: a member that
changes, drops or adds one ends with another transcript than the others, whose signatures it cannot
make. A statement also has a commitment: the digest of a random value that its author shows when it
has verified every member's signature, and that no other process can show before. Pure: bytes in,
value out.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, padding, rsa

from sealring import _native
from sealring.errors import MalformedSetup
from sealring.handshake.terms import (
    Terms,
    digest_of,
    framed,
    group_fields,
    integer_field,
    is_instance,
    is_name,
)
from sealring.identity.kept_key import PrivateKey
from sealring.limits import KEY_BYTES

MAX_STATEMENT_BYTES: Final = 64 << 10
"""A certificate may have an attestation of up to 48 KiB in it."""
_MAX_ADDRESSES_BYTES: Final = 1024
_COMMITMENT_BYTES: Final = 32
_LENGTH: Final = struct.Struct(">I")
_ENTRY: Final = struct.Struct(">II")
"""Before each member's bytes in a bundle: its rank, and how many bytes there are."""
_TRANSCRIPT: Final = b"sealring 2 transcript"
_SECRET: Final = b"sealring 2 group secret"
_GROUP_KEY: Final = b"sealring 2 group key"
_AGREES: Final = b"sealring 2, group transcript"
_CONFIRMS: Final = b"sealring 2 confirmation"


@dataclass(frozen=True, slots=True)
class Statement:
    rank: int
    instance: str
    host: str
    addresses: bytes
    """Where the member can be reached for further links, as in the store; nothing if nowhere."""
    certificate: bytes
    """Its DER encoding."""
    commitment: bytes
    """To the value that the member shows in the last round (`commitment_to`)."""
    contribution: _native.Secret = field(repr=False)
    """Fresh random bytes, towards the group's secret."""

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the certificate."""
        return hashlib.sha256(self.certificate).digest()

    def encode(self) -> bytearray:
        """For the caller to overwrite: the contribution is in it."""
        public = (
            integer_field(self.rank),
            self.instance.encode(),
            self.host.encode(),
            self.addresses,
            self.certificate,
            self.commitment,
        )
        head = b"".join(len(value).to_bytes(4, "big") + value for value in public)
        head += KEY_BYTES.to_bytes(4, "big")
        # Of its final size at once: a buffer that grows leaves copies of its content behind.
        out = bytearray(len(head) + KEY_BYTES)
        with memoryview(out) as view, memoryview(self.contribution) as secret:
            view[: len(head)] = head
            view[len(head) :] = secret
        return out


def parse_statement(raw: bytes | bytearray) -> Statement:
    with memoryview(raw) as view:
        fields = _fields(view)
        if len(fields) != 7:
            raise MalformedSetup("a statement has not the fields it must have")
        public = [bytes(view[at : at + length]) for at, length in fields[:6]]
        at, length = fields[6]
        if (len(public[0]), len(public[5]), length) != (8, _COMMITMENT_BYTES, KEY_BYTES):
            raise MalformedSetup("a statement's rank, commitment or contribution is not one")
        with view[at : at + length] as secret:
            contribution = _native.Secret(secret)
    try:
        instance, host = public[1].decode("ascii"), public[2].decode()
    except UnicodeDecodeError:
        raise MalformedSetup("a statement's names are not text") from None
    if not is_instance(instance) or not is_name(host) or len(public[3]) > _MAX_ADDRESSES_BYTES:
        raise MalformedSetup("a statement's instance, host or addresses are none")
    rank = int.from_bytes(public[0], "big")
    addresses, certificate, commitment = public[3:]
    return Statement(rank, instance, host, addresses, certificate, commitment, contribution)


def encode_bundle(entries: Mapping[int, bytes | bytearray], head: bytes = b"") -> bytearray:
    """Each member's bytes with its rank, in the order of the ranks; `head` before all of it."""
    out = bytearray(len(head) + sum(8 + len(entry) for entry in entries.values()))
    with memoryview(out) as view:
        view[: len(head)] = head
        at = len(head)
        for rank in sorted(entries):
            entry = entries[rank]
            _ENTRY.pack_into(view, at, rank, len(entry))
            end = at + 8 + len(entry)
            view[at + 8 : end] = entry
            at = end
    return out


def parse_bundle(raw: bytes | bytearray, start: int = 0) -> dict[int, bytearray]:
    """For the caller to overwrite, as `raw` is."""
    entries: dict[int, bytearray] = {}
    at, last = start, -1
    with memoryview(raw) as view:
        size = len(view)
        while at < size:
            rank, length = _ENTRY.unpack_from(view, at) if at + 8 <= size else (0, size)
            end = at + 8 + length
            if end > size or rank <= last or length > MAX_STATEMENT_BYTES:
                raise MalformedSetup("a bundle of members' messages is not one")
            entries[rank] = bytearray(view[at + 8 : end])
            at, last = end, rank
    return entries


def transcript_of(terms: Terms, statements: Sequence[Statement]) -> bytes:
    """32 bytes over all that the members agree on; the statements in the group's order."""
    settings = json.dumps(dict(terms.settings), sort_keys=True, separators=(",", ":"))
    fields = [_TRANSCRIPT, *group_fields(terms), settings.encode()]
    for each in statements:
        fields += [
            integer_field(each.rank),
            each.instance.encode(),
            each.host.encode(),
            each.addresses,
            each.fingerprint,
            each.commitment,
            hashlib.sha256(memoryview(each.contribution)).digest(),
        ]
    return digest_of(fields)


def group_secret(transcript: bytes, statements: Sequence[Statement]) -> _native.Secret:
    """From every member's contribution; they are wiped."""
    together = _native.Secret.zeros(KEY_BYTES * len(statements))
    with memoryview(together) as all_of_them:
        for number, each in enumerate(statements):
            with memoryview(each.contribution) as one:
                all_of_them[number * KEY_BYTES : (number + 1) * KEY_BYTES] = one
    secret = together.derive(transcript, _SECRET, KEY_BYTES)
    together.wipe()
    for each in statements:
        each.contribution.wipe()
    return secret


def group_key(secret: _native.Secret, rank: int) -> _native.Secret:
    """What this member seals with that others pass on."""
    return secret.derive(b"", _GROUP_KEY + integer_field(rank), KEY_BYTES)


def commitment_to(value: _native.Secret | bytearray) -> bytes:
    """What a member states in the first round of the value that it shows in the last one."""
    with memoryview(value) as shown:
        digest = hashlib.sha256(framed([_CONFIRMS]) + len(shown).to_bytes(4, "big"))
        digest.update(shown)  # no copy of it, for it may not have been shown yet
    return digest.digest()


def sign_transcript(key: PrivateKey, transcript: bytes) -> bytes:
    signed = _signed(transcript)
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(signed, ec.ECDSA(hashes.SHA256()))
    if isinstance(key, rsa.RSAPrivateKey):
        return key.sign(signed, _PSS, hashes.SHA256())
    return key.sign(signed)


def signature_is_good(certificate: x509.Certificate, transcript: bytes, signature: bytes) -> bool:
    key, signed = certificate.public_key(), _signed(transcript)
    try:
        if isinstance(key, ed25519.Ed25519PublicKey | ed448.Ed448PublicKey):
            key.verify(signature, signed)
        elif isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, signed, ec.ECDSA(hashes.SHA256()))
        elif isinstance(key, rsa.RSAPublicKey):
            key.verify(signature, signed, _PSS, hashes.SHA256())
        else:
            return False
    except InvalidSignature:
        return False
    return True


_PSS: Final = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH)


def _signed(transcript: bytes) -> bytes:
    """As in TLS 1.3 (RFC 8446, 4.4.3): no signature for one purpose is valid for another."""
    return b" " * 64 + _AGREES + b"\0" + transcript


def _fields(view: memoryview) -> list[tuple[int, int]]:
    """Where each field begins, and its length."""
    fields = []
    at, size = 0, len(view)
    while at < size:
        (length,) = _LENGTH.unpack_from(view, at) if at + 4 <= size else (size,)
        at += 4
        if at + length > size:
            raise MalformedSetup("a statement is cut short")
        fields.append((at, length))
        at += length
    return fields
