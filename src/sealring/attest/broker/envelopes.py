"""Encrypts what a broker gives out to the key in the worker's memory (JWE, RFC 7516).

TLS already hides it from the network. The envelope also hides it from a proxy that ends TLS in
front of a broker. And it makes a stolen token worthless: only the worker's key can open what the
token fetches. Workers use a P-256 key; stock KBS clients may use other keys.
"""

from __future__ import annotations

from typing import Any, Final

from joserfc import jwe
from joserfc.errors import JoseError
from joserfc.jwk import ECKey, RSAKey

from sealring.attest.evidence.encoding import from_base64
from sealring.errors import BrokerError, MalformedRequest

KEY_ALGORITHM: Final = "ECDH-ES+A256KW"
RSA_ALGORITHM: Final = "RSA-OAEP-256"
_CONTENT: Final = "A256GCM"
_ALGORITHMS: Final = [KEY_ALGORITHM, RSA_ALGORITHM, _CONTENT]
_FIELDS: Final = ("protected", "encrypted_key", "iv", "ciphertext", "tag")
_EC: Final = {"kty", "crv", "alg", "x", "y"}
_RSA: Final = {"kty", "alg", "n", "e"}
_CURVE_BYTES: Final = {"P-256": 32, "P-384": 48, "P-521": 66}
_RSA_BITS: Final = (2048, 4096)
_RSA_EXPONENT: Final = "AQAB"


class _SortedKey(ECKey):
    """An EC key that writes its fields sorted by name, as does the key that is made for a JWE.

    Stock KBS clients do not authenticate a JWE's header as received. They write it again
    themselves, with sorted fields, so they refuse a header in another order.
    """

    def as_dict(self, private: bool = False, **params: Any) -> Any:
        return dict(sorted(super().as_dict(private, **params).items()))


def new_key() -> ECKey:
    return ECKey.generate_key("P-256")


def public_jwk(key: ECKey) -> dict[str, Any]:
    return {**key.as_dict(private=False), "alg": KEY_ALGORITHM}


def check_jwk(value: Any) -> dict[str, str]:
    """Checks a worker's key: a public P-256 key and nothing else."""
    if not isinstance(value, dict) or set(value) != _EC:
        raise MalformedRequest(f"tee-pubkey has the fields {', '.join(sorted(_EC))}, only")
    if value["crv"] != "P-256":
        raise MalformedRequest(f"tee-pubkey is an EC key on P-256 for {KEY_ALGORITHM}")
    return check_guest_jwk(value)


def check_guest_jwk(value: Any) -> dict[str, str]:
    """Checks a stock KBS client's key: an EC or RSA key in the one accepted form."""
    if not isinstance(value, dict) or set(value) not in (_EC, _RSA):
        raise MalformedRequest("tee-pubkey is a JWK of type EC or RSA, with its alg and no more")
    if not all(isinstance(one, str) for one in value.values()):
        raise MalformedRequest("the fields of tee-pubkey are texts")
    algorithm = {"EC": KEY_ALGORITHM, "RSA": RSA_ALGORITHM}.get(value["kty"])
    if value["alg"] != algorithm:
        raise MalformedRequest(
            f"tee-pubkey is an EC key for {KEY_ALGORITHM} or an RSA key for {RSA_ALGORITHM}"
        )
    if "crv" in value:
        size = _CURVE_BYTES.get(value["crv"])
        if size is None or any(len(_number(value[name])) != size for name in ("x", "y")):
            raise MalformedRequest("tee-pubkey is not a point on P-256, P-384 or P-521")
    else:
        modulus = int.from_bytes(_number(value["n"]), "big")
        fits = _RSA_BITS[0] <= modulus.bit_length() <= _RSA_BITS[1]
        # An even modulus cannot encrypt.
        if value["e"] != _RSA_EXPONENT or not fits or not modulus % 2:
            raise MalformedRequest("tee-pubkey is an RSA key of 2048 to 4096 bits, with e 65537")
    _load(value)
    return value


def seal(content: bytes, jwk: dict[str, str]) -> dict[str, str]:
    header = {"alg": jwk["alg"], "enc": _CONTENT}
    compact = jwe.encrypt_compact(header, content, _load(jwk), algorithms=_ALGORITHMS)
    return dict(zip(_FIELDS, compact.split("."), strict=True))


def open_envelope(value: Any, key: ECKey) -> bytes:
    if not isinstance(value, dict) or not all(isinstance(value.get(name), str) for name in _FIELDS):
        raise BrokerError("the broker's answer is not a JWE", code="broker.malformed_answer")
    compact = ".".join(value[name] for name in _FIELDS)
    try:
        content = jwe.decrypt_compact(compact, key, algorithms=[KEY_ALGORITHM, _CONTENT]).plaintext
    except (JoseError, ValueError):
        content = None
    if content is None:
        raise BrokerError(
            "the broker's answer was not sealed to this worker's key",
            code="broker.malformed_answer",
        )
    return content


def _load(jwk: dict[str, str]) -> ECKey | RSAKey:
    kind = _SortedKey if "crv" in jwk else RSAKey
    try:
        key = kind.import_key({name: value for name, value in jwk.items() if name != "alg"})
        key.public_key  # noqa: B018 (a point that is not on the curve fails here)
    except (JoseError, ValueError, TypeError):
        raise MalformedRequest("tee-pubkey is not a point on its curve, or no RSA key") from None
    return key


def _number(text: str) -> bytes:
    refusal = MalformedRequest("a number of tee-pubkey is not base64url")
    return from_base64(text, refusal, url=True)
