"""Nonces, TPM credentials and tokens. The broker recognizes its own without having stored them.

A nonce is

     0        8         16            32
     | made   | random  | tag         |

The tag is a MAC over both and the session, so giving out a nonce writes nothing. A client that asks
a million times fills no disk, and a restarted broker or another replica recognizes the nonce. When
evidence that passes the policy comes for a nonce, the nonce becomes a row in the store and cannot
be used again. A nonce for which evidence failed is remembered by this broker alone (strangers.py).

A TPM introduces itself when it asks for a nonce, and gets a credential: a secret that only this TPM
can open. The secret is a MAC over the nonce and the TPM's identity, so any replica can check the
answer.

A token is a JWT in the form of an EAR (EAT Attestation Result). It says what the evidence showed,
which worker the holder may be, and which key resources are encrypted to. It is valid for minutes,
and once for each resource.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import OKPKey

from sealring.attest.broker.clock import SKEW_SECONDS
from sealring.attest.broker.keys import BrokerKeys
from sealring.attest.evidence import AttestedWorker, Challenge, Evidence, Trust
from sealring.attest.evidence.encoding import from_base64, to_base64
from sealring.attest.evidence.evidence import MAX_CHAIN, NONCE_BYTES
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
from sealring.core.identity.names import WorkerName
from sealring.errors import AttestationError, BrokerRefusal, MalformedRequest
from sealring.limits import MAX_NONCE_SECONDS
from sealring.version import __version__

TOKEN_SECONDS: Final = 300
_ALGORITHM: Final = "Ed25519"
_PROFILE: Final = "tag:github.com,2023:veraison/ear"
_AFFIRMING, _NONE = "affirming", "none"


@dataclass(frozen=True, slots=True)
class TokenGrant:
    """What a token allows."""

    identifier: str
    name: WorkerName
    world: int
    key: str
    """SHA-256 of the worker's public key (SPKI)."""
    claims: str
    """SHA-256 of the attestation claims that a certificate for this worker will hold."""
    jwk: dict[str, str]
    """The key that resources are encrypted to."""
    until: int


@dataclass(frozen=True, slots=True)
class GuestGrant:
    """A guest without a rank has this token, which allows the same as the guest's session."""

    session: str
    """SHA-256 of the session."""


def make_token(
    keys: BrokerKeys,
    worker: AttestedWorker,
    jwk: dict[str, str],
    policy_digest: str,
    now: float,
    ours: dict[str, Any],
) -> str:
    """Signs a token. `ours`: the fields of a TokenGrant or a GuestGrant that no JWT has."""
    # Simulated evidence proves nothing, so its trust level is AR4SI's 0 (none), not 2 (affirming).
    level = 0 if worker.simulated else 2
    claims: dict[str, Any] = {
        "eat_profile": _PROFILE,
        "iss": "sealring broker",
        "iat": int(now),
        "exp": int(now) + TOKEN_SECONDS,
        "jti": uuid.uuid4().hex,
        "cnf": {"jwk": jwk},
        "ear.verifier-id": {"developer": "sealring", "build": f"sealring {__version__}"},
        "submods": {
            "worker": {
                "ear.status": _NONE if worker.simulated else _AFFIRMING,
                "ear.trustworthiness-vector": {
                    "instance-identity": level,
                    "executables": level,
                    "hardware": level,
                },
                "ear.appraisal-policy-id": f"sha256:{policy_digest}",
                "ear.veraison.annotated-evidence": worker.as_json(),
            }
        },
        "sealring": ours,
    }
    return jwt.encode({"alg": _ALGORITHM}, claims, _key(keys), algorithms=[_ALGORITHM])


def check_token(keys: BrokerKeys, token: str, now: float) -> TokenGrant | GuestGrant:
    try:
        claims = jwt.decode(token, _key(keys), algorithms=[_ALGORITHM]).claims
        ours, until = claims["sealring"], int(claims["exp"])
        grant = GuestGrant(ours["session"]) if "session" in ours else _grant(claims, ours, until)
    except (JoseError, KeyError, TypeError, ValueError):
        raise BrokerRefusal(
            "this broker signed no such token: attest first", code="broker.unknown_token"
        ) from None
    if now >= until:
        raise BrokerRefusal("the token has ended: attest again", code="broker.expired_token")
    return grant


def _grant(claims: dict[str, Any], ours: dict[str, Any], until: int) -> TokenGrant:
    name = WorkerName.parse(ours["name"])
    if name is None:
        raise ValueError
    return TokenGrant(
        claims["jti"], name, ours["world"], ours["key"], ours["claims"], claims["cnf"]["jwk"], until
    )


def _key(keys: BrokerKeys) -> OKPKey:
    return OKPKey.import_key(keys.token_key)


_TAG_AT: Final = 16
KEPT_SECONDS: Final = MAX_NONCE_SECONDS + 2 * SKEW_SECONDS
"""How long a used nonce is remembered: longer than any policy lets a nonce live, so a change of
`nonce_seconds` makes no used nonce valid again."""


def new_session(tee: str) -> str:
    """A new session. It holds the TEE that the client claims; nonces are bound to both."""
    return f"{os.urandom(16).hex()}.{tee}"


def tee_in(session: str) -> str:
    """The TEE of a session. Believe it only after `check_nonce` has accepted a nonce for it."""
    return session.partition(".")[2]


def digest_of(session: str) -> str:
    """The hash that the store holds. Anybody who knows the session itself can use its account."""
    return hashlib.sha256(session.encode()).hexdigest()


def make_nonce(key: bytes, session: str, now: float) -> bytes:
    body = int(now * 1000).to_bytes(8, "big") + os.urandom(8)
    return body + _tag(key, session, body)


def check_nonce(key: bytes, session: str, nonce: bytes, now: float, seconds: int) -> int:
    """Checks that we made the nonce for this session, and not long ago. Returns when we made it."""
    body, tag = nonce[:_TAG_AT], nonce[_TAG_AT:]
    if len(nonce) != NONCE_BYTES or not hmac.compare_digest(tag, _tag(key, session, body)):
        raise BrokerRefusal(
            "this broker gave out no such nonce in this session: ask for one",
            code="broker.unknown_nonce",
        )
    made = int.from_bytes(body[:8], "big") / 1000
    if made - now > SKEW_SECONDS:
        raise BrokerRefusal(
            f"the nonce was made {made - now:.0f} s from now: the brokers' clocks differ, set them",
            code="broker.expired_nonce",
        )
    if now - made > seconds:
        raise BrokerRefusal(
            f"the nonce is older than {seconds} s: ask for another one", code="broker.expired_nonce"
        )
    return int(made)


def _tag(key: bytes, session: str, body: bytes) -> bytes:
    return hmac.new(key, session.encode() + b"\0" + body, hashlib.sha256).digest()[:_TAG_AT]


_LOG = logging.getLogger("sealring.attest.broker")
_CREDENTIAL: Final = b"credential\0"


def credential_for(
    introduction: dict[str, Any], key: bytes, nonce: bytes, trust: Trust
) -> dict[str, Any]:
    """The credential for a TPM that introduced itself. Empty for other hardware."""
    if not introduction:
        return {}
    if set(introduction) - {"others"} != {"chain", "ak"}:
        raise MalformedRequest("a TPM introduces itself by its chain, its ak and perhaps others")
    others = introduction.get("others", [])
    if not isinstance(others, list) or len(others) > MAX_OTHERS:
        raise MalformedRequest(f"a TPM shows at most {MAX_OTHERS} other endorsement keys")
    ak = _sent(introduction["ak"])
    name = check_ak(ak).name

    def sealed(chain: list[bytes]) -> str:
        endorsement = verify_endorsement(chain, trust)
        secret = _secret(key, nonce, subject(chain[0], ak))
        blob = seal_credential(endorsement.leaf.public_key(), name, secret)
        return to_base64(blob)

    answer: dict[str, Any] = {"credential": sealed(_chain(introduction["chain"]))}
    if others:
        answer["others"] = [_known(sealed, _chain(chain)) for chain in others]
    return answer


def _known(sealed: Callable[[list[bytes]], str], chain: list[bytes]) -> str | None:
    """The credential for another key of the TPM. None if that key is not believed."""
    try:
        return sealed(chain)
    except AttestationError as refused:
        _LOG.info("another endorsement key of a TPM is not used: %s", refused)
        return None


def _chain(value: Any) -> list[bytes]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHAIN:
        raise MalformedRequest(f"a TPM's chain has 1 to {MAX_CHAIN} certificates")
    return [_sent(one) for one in value]


def challenge_of(evidence: Evidence, key: bytes, nonce: bytes, public_key: bytes) -> Challenge:
    """The challenge that the evidence must answer. The one that the sender names is ignored."""
    if evidence.kind != TPM or not evidence.chain or "ak" not in evidence.parts:
        return Challenge(nonce, public_key)
    ak = evidence.parts["ak"]
    # A secret was sent for each key. Only a TPM that holds all of the keys can open all secrets.
    others = split_certificates(evidence.parts.get("endorsements", b""))
    secrets = [_secret(key, nonce, subject(one, ak)) for one in (evidence.chain[0], *others)]
    whom = subject(evidence.chain[0], ak, others)
    return Challenge(nonce, public_key, whom + joint_secret(secrets))


def _secret(key: bytes, nonce: bytes, whom: bytes) -> bytes:
    return hmac.new(key, _CREDENTIAL + nonce + whom, hashlib.sha256).digest()


def _sent(value: Any) -> bytes:
    return from_base64(value, MalformedRequest("a TPM's introduction is in base64"))
