"""Credentials for TPMs, whose secret a broker knows again without having kept it.

A TPM introduces itself when it asks for a nonce. The secret that only it can open is a MAC over the
nonce and whom it is for, so giving one out writes nothing, and any replica can judge the answer.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import Any, Final

from sealring.errors import MalformedRequest
from sealring.identity.attestation import Challenge, Evidence, Trust
from sealring.identity.attestation.evidence import MAX_CHAIN
from sealring.identity.attestation.tpm.credential import (
    check_ak,
    seal_credential,
    subject,
    verify_endorsement,
)
from sealring.identity.attestation.tpm.verify import KIND as TPM

_PURPOSE: Final = b"credential\0"


def credential_for(
    introduction: dict[str, Any], key: bytes, nonce: bytes, trust: Trust
) -> dict[str, str]:
    """What goes back with the nonce to a TPM that said who it is; nothing for other hardware."""
    if not introduction:
        return {}
    if set(introduction) != {"chain", "ak"} or not isinstance(introduction["chain"], list):
        raise MalformedRequest("a TPM introduces itself by its chain and its ak")
    if not 1 <= len(introduction["chain"]) <= MAX_CHAIN:
        raise MalformedRequest(f"a TPM's chain has 1 to {MAX_CHAIN} certificates")
    chain = [_bytes(one) for one in introduction["chain"]]
    ak = _bytes(introduction["ak"])
    endorsement = verify_endorsement(chain, trust)
    secret = _secret(key, nonce, subject(chain[0], ak))
    blob = seal_credential(endorsement.leaf.public_key(), check_ak(ak).name, secret)
    return {"credential": base64.b64encode(blob).decode()}


def challenge_of(evidence: Evidence, key: bytes, nonce: bytes, public_key: bytes) -> Challenge:
    """What the evidence must have been made for. The sender's own word on it is not asked."""
    if evidence.kind != TPM or not evidence.chain or "ak" not in evidence.parts:
        return Challenge(nonce, public_key)
    whom = subject(evidence.chain[0], evidence.parts["ak"])
    return Challenge(nonce, public_key, whom + _secret(key, nonce, whom))


def _secret(key: bytes, nonce: bytes, whom: bytes) -> bytes:
    return hmac.new(key, _PURPOSE + nonce + whom, hashlib.sha256).digest()


def _bytes(value: Any) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise MalformedRequest("a TPM's introduction is in base64") from None
