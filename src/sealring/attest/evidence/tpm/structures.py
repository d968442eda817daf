"""The bytes that a TPM signs, and its signing keys (TPM 2.0 library specification, part 2)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from sealring.attest.evidence.encoding import (
    ORDERS,
    Cursor,
    check_signed,
    check_spelling,
    unknown_evidence,
    with_lower_s,
)
from sealring.errors import ForgedEvidence, MalformedEvidence

PublicKey = rsa.RSAPublicKey | ec.EllipticCurvePublicKey

SHA256: Final = 0x000B
SHA384: Final = 0x000C
NULL: Final = 0x0010
RSA, ECC = 0x0001, 0x0023
RSASSA, RSAPSS, ECDSA = 0x0014, 0x0016, 0x0018
PCRS: Final = 24
BANKS: Final = {SHA256: 32, SHA384: 48}
"""The banks of PCRs that we read, and the size of a value."""
_MAGIC: Final = 0xFF544347
_QUOTE: Final = 0x8018
_CURVES: Final[dict[int, ec.EllipticCurve]] = {3: ec.SECP256R1(), 4: ec.SECP384R1()}
_HASHES: Final[dict[int, hashes.HashAlgorithm]] = {
    SHA256: hashes.SHA256(),
    SHA384: hashes.SHA384(),
    0x000D: hashes.SHA512(),
}


@dataclass(frozen=True, slots=True)
class TpmQuote:
    """TPMS_ATTEST of a quote."""

    extra_data: bytes
    resets: int
    restarts: int
    firmware: int
    bank: int
    """SHA256 or SHA384."""
    pcrs: tuple[int, ...]
    """The selected PCRs of that bank, in the order in which they are hashed."""
    digest: bytes


@dataclass(frozen=True, slots=True)
class Public:
    """TPMT_PUBLIC of a signing key."""

    key: PublicKey
    attributes: int
    name: bytes
    """A TPM names an object by the hash of its whole public part."""


def parse_quote(data: bytes) -> TpmQuote:
    cursor = Cursor(data, "the TPM quote", "big")
    if cursor.number(4) != _MAGIC:
        raise MalformedEvidence("the quote does not begin as what a TPM makes and signs")
    if cursor.number(2) != _QUOTE:
        raise MalformedEvidence("the TPM signed something, but not a quote")
    cursor.sized(2)  # the signer's qualified name: the key that verifies the quote says more
    extra_data = cursor.sized(2)
    cursor.take(8)  # the clock: the nonce already shows that the quote is fresh
    resets, restarts = cursor.number(4), cursor.number(4)
    cursor.take(1)
    firmware = cursor.number(8)
    banks, bank = cursor.number(4), cursor.number(2)
    if banks != 1 or bank not in BANKS:
        raise unknown_evidence(
            "the quote is not over the SHA-256 or the SHA-384 bank of PCRs alone"
        )
    selection = cursor.sized(1)
    if len(selection) != PCRS // 8:
        raise unknown_evidence(f"the quote selects among {8 * len(selection)} PCRs, not {PCRS}")
    pcrs = tuple(n for n in range(PCRS) if selection[n // 8] >> n % 8 & 1)
    digest = cursor.sized(2)
    cursor.end()
    return TpmQuote(extra_data, resets, restarts, firmware, bank, pcrs, digest)


def parse_public(data: bytes) -> Public:
    cursor = Cursor(data, "the TPM key", "big")
    kind, name_hash, attributes = cursor.number(2), cursor.number(2), cursor.number(4)
    if name_hash != SHA256:
        raise unknown_evidence(f"TPM keys that are named by hash {name_hash:#x} are not known")
    cursor.sized(2)
    if cursor.number(2) != NULL:
        raise unknown_evidence("a TPM key that signs has no symmetric cipher, and this one has")
    scheme = cursor.number(2)
    if scheme not in (NULL, RSASSA, RSAPSS, ECDSA):
        raise unknown_evidence(f"TPM signature scheme {scheme:#x} is not known")
    if scheme != NULL:
        cursor.number(2)
    key: PublicKey
    if kind == RSA:
        cursor.number(2)
        exponent = cursor.number(4) or 65537
        modulus = int.from_bytes(cursor.sized(2), "big")
        key = _rsa(exponent, modulus)
    elif kind == ECC:
        curve = _CURVES.get(cursor.number(2))
        if cursor.number(2) != NULL or curve is None:
            raise unknown_evidence("the TPM key's curve is not known")
        x, y = (int.from_bytes(cursor.sized(2), "big") for _ in range(2))
        key = _point(x, y, curve)
    else:
        raise unknown_evidence(f"TPM keys of type {kind:#x} are not known")
    cursor.end()
    return Public(key, attributes, name_of(data))


def digest_of_pcrs(signature: bytes, values: bytes) -> bytes:
    """A quote's digest of the PCRs' values. Its hash is that of the quote's signature."""
    algorithm = _HASHES.get(int.from_bytes(signature[2:4], "big"))
    if algorithm is None:
        raise unknown_evidence("the TPM signature's hash is not known")
    return hashlib.new(algorithm.name, values).digest()


def name_of(public: bytes) -> bytes:
    return SHA256.to_bytes(2, "big") + hashlib.sha256(public).digest()


def canonical_signature(signature: bytes, key: PublicKey) -> bytes:
    """The signature as a worker sends it. Some TPMs leave out leading zeros of its numbers."""
    if isinstance(key, rsa.RSAPublicKey) or signature[:2] != ECDSA.to_bytes(2, "big"):
        return signature
    cursor = Cursor(signature, "the TPM signature", "big")
    scheme = cursor.take(4)
    size = (key.key_size + 7) // 8
    r, s = (cursor.sized(2).lstrip(b"\0").rjust(size, b"\0") for _ in range(2))
    cursor.end()
    s = with_lower_s(s, 0, size, ORDERS[key.curve.name])
    return scheme + b"".join(len(part).to_bytes(2, "big") + part for part in (r, s))


def check_signature(key: PublicKey, signature: bytes, message: bytes) -> None:
    """Verifies a TPMT_SIGNATURE over the message, made by this key."""
    check_spelling(signature, canonical_signature(signature, key), "the TPM quote")
    cursor = Cursor(signature, "the TPM signature", "big")
    scheme, number = cursor.number(2), cursor.number(2)
    algorithm = _HASHES.get(number)
    if algorithm is None:
        raise unknown_evidence(f"TPM signatures with hash {number:#x} are not known")
    pad: padding.AsymmetricPadding | None = None
    if scheme == ECDSA and isinstance(key, ec.EllipticCurvePublicKey):
        r, s = (int.from_bytes(cursor.sized(2), "big") for _ in range(2))
        raw = encode_dss_signature(r, s)
    elif scheme in (RSASSA, RSAPSS) and isinstance(key, rsa.RSAPublicKey):
        raw = cursor.sized(2)
        if scheme == RSAPSS:
            pad = padding.PSS(padding.MGF1(algorithm), padding.PSS.AUTO)
    else:
        raise unknown_evidence(f"TPM signature scheme {scheme:#x} does not go with the key")
    cursor.end()
    try:
        check_signed(key, raw, message, algorithm, pad)
    except InvalidSignature:
        raise ForgedEvidence("the quote is not signed by the TPM's attestation key") from None


def _rsa(exponent: int, modulus: int) -> rsa.RSAPublicKey:
    if not 2048 <= modulus.bit_length() <= 4096:
        raise unknown_evidence(f"RSA keys of {modulus.bit_length()} bits are not accepted")
    try:
        return rsa.RSAPublicNumbers(exponent, modulus).public_key()
    except ValueError:
        raise MalformedEvidence("the RSA key is none") from None


def _point(x: int, y: int, curve: ec.EllipticCurve) -> ec.EllipticCurvePublicKey:
    try:
        return ec.EllipticCurvePublicNumbers(x, y, curve).public_key()
    except ValueError:
        raise MalformedEvidence("the TPM key is no point of its curve") from None
