"""The envelope in which evidence travels, and what evidence must be bound to.

{"version": 1, "kind": "snp", "challenge": {"nonce": hex, "public_key": base64 DER},
 "parts": {"report": base64}, "chain": [base64 DER, leaf first, root last]}

Parsing says nothing about truth. One spelling only: whatever parses is written back as it came.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sealring.errors import MalformedEvidence, UnknownEvidence

VERSION: Final = 1
NONCE_BYTES: Final = 32
MAX_EVIDENCE_BYTES: Final = 256 << 10
MAX_CHAIN: Final = 8
_BINDING: Final = b"sealring-1 attestation\0"
_FIELDS: Final = {"version", "kind", "challenge", "parts", "chain"}


@dataclass(frozen=True, slots=True)
class Challenge:
    """What evidence must be made for: the verifier's nonce and the worker's public key."""

    nonce: bytes
    public_key: bytes
    """DER, SubjectPublicKeyInfo."""

    def report_data(self, kind: str) -> bytes:
        """The 64 bytes that the hardware signs. The kind keeps one TEE's from passing as another's.

        All but the last part have a fixed length or an end, so no two inputs meet.
        """
        return hashlib.sha512(
            _BINDING + kind.encode() + b"\0" + self.nonce + self.public_key
        ).digest()


@dataclass(frozen=True, slots=True)
class Evidence:
    kind: str
    challenge: Challenge
    """What the sender says it was made for; a verifier brings its own."""
    parts: Mapping[str, bytes]
    chain: tuple[bytes, ...]

    def only(self, *names: str) -> tuple[bytes, ...]:
        """The parts of these names, if there are no others."""
        if set(self.parts) != set(names):
            raise MalformedEvidence(f"{self.kind} evidence has the parts {', '.join(names)}, only")
        return tuple(self.parts[name] for name in names)

    def encode(self) -> bytes:
        return json.dumps(
            {
                "version": VERSION,
                "kind": self.kind,
                "challenge": {
                    "nonce": self.challenge.nonce.hex(),
                    "public_key": _text(self.challenge.public_key),
                },
                "parts": {name: _text(part) for name, part in self.parts.items()},
                "chain": [_text(certificate) for certificate in self.chain],
            }
        ).encode()


def parse_evidence(data: bytes) -> Evidence:
    if len(data) > MAX_EVIDENCE_BYTES:
        raise MalformedEvidence(f"evidence has at most {MAX_EVIDENCE_BYTES} bytes")
    try:
        fields = json.loads(data.decode(), object_pairs_hook=_no_repetition)
    except (ValueError, RecursionError):
        raise MalformedEvidence("evidence is a JSON object, and this is not one") from None
    if not isinstance(fields, dict):
        raise MalformedEvidence("evidence is a JSON object, and this is not one")
    version = fields.get("version")
    if type(version) is not int or version != VERSION:
        raise UnknownEvidence(f"the evidence is not of version {VERSION}: install one sealring")
    if set(fields) != _FIELDS:
        raise MalformedEvidence(f"evidence has exactly the fields {', '.join(sorted(_FIELDS))}")
    kind, parts, chain = fields["kind"], fields["parts"], fields["chain"]
    if not isinstance(kind, str) or not (kind.isascii() and kind.isalpha() and len(kind) < 32):
        raise MalformedEvidence("kind is a word")
    if not isinstance(parts, dict) or not 1 <= len(parts) <= 16:
        raise MalformedEvidence("parts is an object of 1 to 16 fields")
    if not isinstance(chain, list) or len(chain) > MAX_CHAIN:
        raise MalformedEvidence(f"chain is a list of at most {MAX_CHAIN} certificates")
    return Evidence(
        kind,
        _challenge(fields["challenge"]),
        {name: _bytes(part, "a part") for name, part in parts.items()},
        tuple(_bytes(certificate, "a certificate") for certificate in chain),
    )


def _challenge(value: Any) -> Challenge:
    if not isinstance(value, dict) or set(value) != {"nonce", "public_key"}:
        raise MalformedEvidence("challenge is an object of nonce and public_key")
    nonce = value["nonce"]
    try:
        raw = bytes.fromhex(nonce)
    except (ValueError, TypeError):
        raise MalformedEvidence("the nonce is not hexadecimal") from None
    if len(raw) != NONCE_BYTES or raw.hex() != nonce:
        raise MalformedEvidence(f"the nonce is not {NONCE_BYTES} bytes in lower-case hexadecimal")
    return Challenge(raw, _bytes(value["public_key"], "the public key"))


def _bytes(value: Any, what: str) -> bytes:
    if isinstance(value, str):
        try:
            raw = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        if raw and _text(raw) == value:
            return raw
    raise MalformedEvidence(f"{what} is not base64 in its one canonical form")


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _no_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a field comes twice")
    return fields
