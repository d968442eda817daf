"""What a certificate says of its holder's attestation: the broker's word, signed with the rest.

{"version": 1, "label", "evidence": SHA-256, "nonce": hex, "policy": SHA-256, "worker": {...}}

A ClaimedWorker is believed as far as its authority is. Anyone who has the authority's key can claim
anything; a policy with `[peers] evidence = true` therefore has peers show the evidence itself.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final, get_args, get_origin, get_type_hints

from cryptography import x509

from sealring.attest.evidence.revocation import ListSeen
from sealring.attest.evidence.worker import AttestedDevice, AttestedWorker, DescribedWorker
from sealring.core.identity.certificates import ATTESTATION_OID
from sealring.formats.strict import read_json

VERSION: Final = 1
MAX_CLAIM_BYTES: Final = 48 << 10
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_MAX_TEXT: Final = 1024
_YEAR_10000: Final = 253402300800
_PLAIN: Final = (str, int, bool)
_NESTED: Final = (ListSeen, AttestedDevice)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedWorker(DescribedWorker):
    """What a certificate says; whether its issuer may say so was verified before."""

    nonce: bytes
    evidence_digest: str
    policy_digest: str
    """SHA-256 of the policy by which the issuer admitted the worker."""


def encode_claims(
    worker: AttestedWorker, evidence_digest: str, policy_digest: str, ima_rules: str = ""
) -> bytes:
    """`ima_rules` is the digest of the rules by which the measured files were admitted."""
    told = {one.name: _plain(getattr(worker, one.name)) for one in fields(DescribedWorker)}
    claims = {
        "version": VERSION,
        # Near the front, so that it is seen in any dump of the certificate.
        "label": worker.label,
        "evidence": evidence_digest,
        "nonce": worker.challenge.nonce.hex(),
        "policy": policy_digest,
        "worker": told | {"ima_files": {}, "ima_rules": ima_rules},
    }
    return json.dumps(claims, separators=(",", ":")).encode()


def claims_in(certificate: x509.Certificate) -> ClaimedWorker | None:
    """What a certificate claims of an attestation; None if nothing. ValueError: not readable."""
    try:
        extension = certificate.extensions.get_extension_for_oid(ATTESTATION_OID).value
    except x509.ExtensionNotFound:
        return None
    return parse_claims(extension.public_bytes())


def parse_claims(data: bytes) -> ClaimedWorker:
    if len(data) > MAX_CLAIM_BYTES:
        raise ValueError(f"its attestation has more than {MAX_CLAIM_BYTES} bytes")
    try:
        claims = read_json(data)
        digest, policy = claims["evidence"], claims["policy"]
        nonce = bytes.fromhex(claims["nonce"])
        if type(claims["version"]) is not int or claims["version"] != VERSION:
            raise ValueError
        if _DIGEST.fullmatch(digest) is None or _DIGEST.fullmatch(policy) is None:
            raise ValueError
        described = _fields_of(claims["worker"], DescribedWorker)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise ValueError("its attestation cannot be read") from None
    return ClaimedWorker(**described, nonce=nonce, evidence_digest=digest, policy_digest=policy)


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, datetime):
        return value.timestamp()
    if isinstance(value, _NESTED):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, _PLAIN):
        return value
    return {name: _plain(one) for name, one in value.items()}


def _typed(value: Any, kind: Any) -> Any:
    """The value of a field of this type, or ValueError: nothing is converted on the way."""
    if kind in _PLAIN:
        if type(value) is not kind or (kind is str and len(value) > _MAX_TEXT):
            raise ValueError
        return value
    if kind is datetime:
        if type(value) not in (int, float) or not 0 <= value < _YEAR_10000:
            raise ValueError
        return datetime.fromtimestamp(value, UTC)
    if kind in _NESTED:
        return kind(**_fields_of(value, kind))
    (*_, inner) = [one for one in get_args(kind) if one is not Ellipsis]
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError
        return tuple(_typed(one, inner) for one in value)
    return {_typed(name, str): _typed(one, inner) for name, one in value.items()}


def _fields_of(value: Any, kind: type) -> dict[str, Any]:
    types = _types_of(kind)
    if not isinstance(value, dict) or set(value) != set(types):
        raise ValueError
    return {name: _typed(value[name], types[name]) for name in types}


@cache
def _types_of(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {one.name: hints[one.name] for one in fields(kind)}
