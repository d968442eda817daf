"""Credentials for TPMs, whose secret a broker knows again without having kept it.

A TPM introduces itself when it asks for a nonce. The secret that only it can open is a MAC over the
nonce and whom it is for, so giving one out writes nothing, and any replica can judge the answer.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
from collections.abc import Callable
from typing import Any, Final

from sealring.attest.evidence import Challenge, Evidence, Trust
from sealring.attest.evidence.evidence import MAX_CHAIN
from sealring.attest.evidence.tpm.credential import (
    MAX_OTHERS,
    check_ak,
    joint_secret,
    seal_credential,
    split_certificates,
    subject,
    verify_endorsement,
)
from sealring.attest.evidence.tpm.verify import KIND as TPM
from sealring.errors import AttestationError, MalformedRequest

_LOG = logging.getLogger("sealring.attest.broker")
_PURPOSE: Final = b"credential\0"


def credential_for(
    introduction: dict[str, Any], key: bytes, nonce: bytes, trust: Trust
) -> dict[str, Any]:
    """What goes back with the nonce to a TPM that said who it is; nothing for other hardware."""
    if not introduction:
        return {}
    if set(introduction) - {"others"} != {"chain", "ak"}:
        raise MalformedRequest("a TPM introduces itself by its chain, its ak and perhaps others")
    others = introduction.get("others", [])
    if not isinstance(others, list) or len(others) > MAX_OTHERS:
        raise MalformedRequest(f"a TPM shows at most {MAX_OTHERS} other endorsement keys")
    ak = _bytes(introduction["ak"])
    name = check_ak(ak).name

    def sealed(chain: list[bytes]) -> str:
        endorsement = verify_endorsement(chain, trust)
        secret = _secret(key, nonce, subject(chain[0], ak))
        blob = seal_credential(endorsement.leaf.public_key(), name, secret)
        return base64.b64encode(blob).decode()

    answer: dict[str, Any] = {"credential": sealed(_chain(introduction["chain"]))}
    if others:
        answer["others"] = [_known(sealed, _chain(chain)) for chain in others]
    return answer


def _known(sealed: Callable[[list[bytes]], str], chain: list[bytes]) -> str | None:
    """Another key of the TPM's. One that cannot be believed is left out: it need not be shown."""
    try:
        return sealed(chain)
    except AttestationError as refused:
        _LOG.info("another endorsement key of a TPM is not used: %s", refused)
        return None


def _chain(value: Any) -> list[bytes]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHAIN:
        raise MalformedRequest(f"a TPM's chain has 1 to {MAX_CHAIN} certificates")
    return [_bytes(one) for one in value]


def challenge_of(evidence: Evidence, key: bytes, nonce: bytes, public_key: bytes) -> Challenge:
    """What the evidence must have been made for. The sender's own word on it is not asked."""
    if evidence.kind != TPM or not evidence.chain or "ak" not in evidence.parts:
        return Challenge(nonce, public_key)
    ak = evidence.parts["ak"]
    # Only a TPM that holds these keys too could open what was sent for them.
    others = split_certificates(evidence.parts.get("endorsements", b""))
    secrets = [_secret(key, nonce, subject(one, ak)) for one in (evidence.chain[0], *others)]
    whom = subject(evidence.chain[0], ak, others)
    return Challenge(nonce, public_key, whom + joint_secret(secrets))


def _secret(key: bytes, nonce: bytes, whom: bytes) -> bytes:
    return hmac.new(key, _PURPOSE + nonce + whom, hashlib.sha256).digest()


def _bytes(value: Any) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise MalformedRequest("a TPM's introduction is in base64") from None
