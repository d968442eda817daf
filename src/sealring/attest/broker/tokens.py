"""The broker's verdict as a token: a JWT in the form of an EAR (EAT Attestation Result).

It says what the evidence showed, who the worker may be and which key things are sealed to. It is
good for minutes, and once for each thing that it fetches.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any, Final

from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import OKPKey

from sealring.attest.broker.keys import BrokerKeys
from sealring.attest.evidence import AttestedWorker
from sealring.core.identity.names import WorkerName
from sealring.errors import ExpiredToken, UnknownToken
from sealring.version import __version__

TOKEN_SECONDS: Final = 300
_ALGORITHM: Final = "Ed25519"
_PROFILE: Final = "tag:github.com,2023:veraison/ear"
_AFFIRMING, _NONE = "affirming", "none"


@dataclass(frozen=True, slots=True)
class Grant:
    """What a token entitles to."""

    identifier: str
    name: WorkerName
    world: int
    key: str
    """SHA-256 of the worker's public key (SPKI)."""
    claims: str
    """SHA-256 of what a certificate for it will say of its attestation."""
    jwk: dict[str, str]
    """What things are sealed to."""
    until: int


@dataclass(frozen=True, slots=True)
class GuestGrant:
    """What the token of a guest without a rank entitles to: what its session does."""

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
    """`ours`: the fields of a Grant or a GuestGrant that the token itself does not have."""
    # Simulated evidence proves nothing, and so affirms nothing (AR4SI's 0, not its 2).
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


def check_token(keys: BrokerKeys, token: str, now: float) -> Grant | GuestGrant:
    try:
        claims = jwt.decode(token, _key(keys), algorithms=[_ALGORITHM]).claims
        ours, until = claims["sealring"], int(claims["exp"])
        grant = GuestGrant(ours["session"]) if "session" in ours else _grant(claims, ours, until)
    except (JoseError, KeyError, TypeError, ValueError):
        raise UnknownToken("this broker signed no such token: attest first") from None
    if now >= until:
        raise ExpiredToken("the token has ended: attest again")
    return grant


def _grant(claims: dict[str, Any], ours: dict[str, Any], until: int) -> Grant:
    name = WorkerName.parse(ours["name"])
    if name is None:
        raise ValueError
    return Grant(
        claims["jti"], name, ours["world"], ours["key"], ours["claims"], claims["cnf"]["jwk"], until
    )


def _key(keys: BrokerKeys) -> OKPKey:
    return OKPKey.import_key(keys.token_key)
