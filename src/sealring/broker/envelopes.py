"""What a broker gives out, sealed to the key in the worker's memory (JWE, RFC 7516).

TLS already hides it from the network. The envelope hides it from whatever ends TLS in front of a
broker, and makes a stolen token worthless: what it fetches opens with the worker's key alone.
"""

from __future__ import annotations

from typing import Any, Final

from joserfc import jwe
from joserfc.errors import JoseError
from joserfc.jwk import ECKey

from sealring.errors import MalformedAnswer, MalformedRequest

KEY_ALGORITHM: Final = "ECDH-ES+A256KW"
_CONTENT: Final = "A256GCM"
_ALGORITHMS: Final = [KEY_ALGORITHM, _CONTENT]
_FIELDS: Final = ("protected", "encrypted_key", "iv", "ciphertext", "tag")
_JWK: Final = {"kty", "crv", "alg", "x", "y"}


def new_key() -> ECKey:
    return ECKey.generate_key("P-256")


def public_jwk(key: ECKey) -> dict[str, Any]:
    return {**key.as_dict(private=False), "alg": KEY_ALGORITHM}


def check_jwk(value: Any) -> dict[str, str]:
    """A public P-256 key and nothing else."""
    if not isinstance(value, dict) or set(value) != _JWK:
        raise MalformedRequest(f"tee-pubkey has the fields {', '.join(sorted(_JWK))}, only")
    if (value["kty"], value["crv"], value["alg"]) != ("EC", "P-256", KEY_ALGORITHM):
        raise MalformedRequest(f"tee-pubkey is an EC key on P-256 for {KEY_ALGORITHM}")
    _load(value)
    return value


def seal(content: bytes, jwk: dict[str, str]) -> dict[str, str]:
    header = {"alg": KEY_ALGORITHM, "enc": _CONTENT}
    compact = jwe.encrypt_compact(header, content, _load(jwk), algorithms=_ALGORITHMS)
    return dict(zip(_FIELDS, compact.split("."), strict=True))


def open_envelope(value: Any, key: ECKey) -> bytes:
    if not isinstance(value, dict) or not all(isinstance(value.get(name), str) for name in _FIELDS):
        raise MalformedAnswer("the broker's answer is not a JWE")
    compact = ".".join(value[name] for name in _FIELDS)
    try:
        content = jwe.decrypt_compact(compact, key, algorithms=_ALGORITHMS).plaintext
    except (JoseError, ValueError):
        content = None
    if content is None:
        raise MalformedAnswer("the broker's answer was not sealed to this worker's key")
    return content


def _load(jwk: dict[str, str]) -> ECKey:
    try:
        key = ECKey.import_key({name: jwk[name] for name in ("kty", "crv", "x", "y")})
        key.public_key  # noqa: B018 (a point that is not on the curve fails here)
    except (JoseError, ValueError, TypeError):
        raise MalformedRequest("tee-pubkey is not a point on P-256") from None
    return key
