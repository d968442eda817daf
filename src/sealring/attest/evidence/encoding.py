"""Reads and writes what evidence is made of: structures, makers' loose DER, base64, signatures."""

from __future__ import annotations

import base64
import binascii
import dataclasses
from typing import Any, Final, Literal, TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384, HashAlgorithm

from sealring.errors import AttestationError, ForgedEvidence, MalformedEvidence

T = TypeVar("T")
Order = Literal["little", "big"]


def unknown_evidence(problem: str) -> MalformedEvidence:
    """An error for a kind, version or algorithm that this version of sealring cannot judge."""
    return MalformedEvidence(problem, code="evidence.unknown_evidence")


def not_bound(problem: str) -> AttestationError:
    """True evidence that was made for something else."""
    return AttestationError(problem, code="evidence.not_bound")


class Cursor:
    def __init__(self, data: bytes, what: str, order: Order) -> None:
        self._data, self._what, self._order = data, what, order
        self._at = 0

    @property
    def at(self) -> int:
        return self._at

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise MalformedEvidence(f"{self._what} is cut: {size} bytes wanted at {self._at}")
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), self._order)

    def sized(self, size_bytes: int) -> bytes:
        """Bytes that follow their own length."""
        return self.take(self.number(size_bytes))

    def end(self) -> None:
        if self.left:
            raise MalformedEvidence(f"{self._what} has {self.left} bytes too many")


def at(offset: int, size: int, *, zero: bool = False) -> Any:
    """Declares where a field of a fixed structure is, in a dataclass for `read_structure`."""
    return dataclasses.field(metadata={"place": (offset, size), "zero": zero})


def places(kind: Any) -> dict[str, tuple[int, int]]:
    """Offset and size of each field of a fixed structure."""
    return {one.name: one.metadata["place"] for one in dataclasses.fields(kind)}


def read_structure(kind: type[T], data: bytes, what: str) -> T:
    """Reads a structure with little-endian numbers. More bytes may follow it."""
    values: dict[str, Any] = {}
    for one in dataclasses.fields(kind):  # type: ignore[arg-type]
        offset, size = one.metadata["place"]
        raw = data[offset : offset + size]
        if len(raw) != size:
            raise MalformedEvidence(f"{what} is cut: {size} bytes wanted at {offset}")
        if one.metadata["zero"] and any(raw):
            raise MalformedEvidence(f"{size} bytes of {what} at {offset} are not zero")
        values[one.name] = int.from_bytes(raw, "little") if one.type in (int, "int") else raw
    return kind(**values)


def sized(data: bytes) -> bytes:
    """Bytes after their length in two bytes, as a TPM reads them."""
    return len(data).to_bytes(2, "big") + data


_SET: Final = 0x31
_CONSTRUCTED: Final = 0x20
_MAX_DEPTH: Final = 16


def with_sets_in_order(der: bytes, depth: int = 0) -> bytes:
    """Return `der` with each SET's members sorted. ValueError if it breaks other rules of DER."""
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deep")
    return b"".join(
        _in_order(der[start:body], der[body:end], depth) for start, body, end in _members(der)
    )


def signed_part(der: bytes) -> bytes:
    """The bytes of a certificate that its issuer signed."""
    ((_, body, end),) = _members(der)
    inner = der[body:end]
    start, _, stop = _members(inner)[0]
    return inner[start:stop]


def first_value(der: bytes) -> bytes:
    """The first DER value, whatever follows it. ValueError: it is not DER."""
    _, _, end = _member(der, 0)
    return der[:end]


def _in_order(head: bytes, body: bytes, depth: int) -> bytes:
    if not head[0] & _CONSTRUCTED:
        return head + body
    inside = with_sets_in_order(body, depth + 1)
    if head[0] == _SET:
        inside = b"".join(sorted(inside[start:end] for start, _, end in _members(inside)))
    return head + inside


def _members(der: bytes) -> list[tuple[int, int, int]]:
    """The start of each value, the start of its body, and its end."""
    found, at = [], 0
    while at < len(der):
        found.append(_member(der, at))
        at = found[-1][2]
    return found


def _member(der: bytes, at: int) -> tuple[int, int, int]:
    if at + 2 > len(der) or der[at] & 0x1F == 0x1F:
        raise ValueError("not a plain tag")
    size, body = der[at + 1], at + 2
    if size & 0x80:
        count = size & 0x7F
        if not 1 <= count <= 4:
            raise ValueError("a length of no known form")
        size = int.from_bytes(der[body : body + count], "big")
        body += count
    if body + size > len(der):
        raise ValueError("cut")
    return at, body, body + size


def from_hex(value: Any, size: int, refusal: Exception) -> bytes:
    """Reads `size` bytes of lower-case hexadecimal, or raises `refusal`."""
    try:
        raw = bytes.fromhex(value)
    except (ValueError, TypeError):
        raise refusal from None
    if len(raw) != size or raw.hex() != value:
        raise refusal
    return raw


def to_base64(raw: bytes, *, url: bool = False) -> str:
    """Base64. With `url`, base64url without padding, as JOSE writes it."""
    if url:
        return base64.urlsafe_b64encode(raw).decode().rstrip("=")
    return base64.b64encode(raw).decode()


def from_base64(value: Any, refusal: Exception, *, url: bool = False) -> bytes:
    """The bytes of a text in its one canonical form. Raises `refusal` for any other text."""
    try:
        padded = value + "=" * (-len(value) % 4) if url else value
        raw = base64.b64decode(padded, b"-_" if url else None, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise refusal from None
    if to_base64(raw, url=url) != value:
        raise refusal
    return raw


def from_any_base64(text: str) -> bytes:
    """The bytes of base64 or base64url, padded or not. ValueError, TypeError: it is neither."""
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


P256_ORDER: Final = int("FFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551", 16)
P384_ORDER: Final = int(
    "FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF"
    "C7634D81F4372DDF581A0DB248B0A77AECEC196ACCC52973",
    16,
)
ORDERS: Final = {"secp256r1": P256_ORDER, "secp384r1": P384_ORDER}


def with_lower_s(data: bytes, at: int, size: int, order: int, byteorder: Order = "big") -> bytes:
    """Replaces the ECDSA number s at this place by n - s, if that is smaller."""
    s = int.from_bytes(data[at : at + size], byteorder)
    if not order // 2 < s < order:
        return data
    return data[:at] + (order - s).to_bytes(size, byteorder) + data[at + size :]


def check_spelling(sent: bytes, canonical: bytes, what: str) -> None:
    if sent != canonical:
        raise MalformedEvidence(
            f"{what} is not in its one spelling: another sealring wrote it, or somebody changed it "
            "on the way"
        )


def numbers_of(signature: bytes) -> tuple[int, int]:
    """The numbers r and s of an ECDSA signature, which is r followed by s."""
    half = len(signature) // 2
    return int.from_bytes(signature[:half], "big"), int.from_bytes(signature[half:], "big")


def check_ecdsa(
    key: object,
    numbers: tuple[int, int],
    signed: bytes,
    what: str,
    *,
    curve: type[ec.EllipticCurve] = ec.SECP384R1,
    algorithm: HashAlgorithm | None = None,
) -> None:
    """Raises ForgedEvidence unless the key, on that curve, made this signature."""
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, curve):
        raise ForgedEvidence(f"the key that signs {what} is not on {curve.name}")
    try:
        key.verify(encode_dss_signature(*numbers), signed, ec.ECDSA(algorithm or SHA384()))
    except InvalidSignature:
        raise ForgedEvidence(f"{what} is not signed by the key of its certificate") from None


def check_signed(
    key: object,
    signature: bytes,
    signed: bytes,
    algorithm: HashAlgorithm,
    pad: padding.AsymmetricPadding | None = None,
) -> None:
    """Raises InvalidSignature unless this RSA or EC key signed. `pad` replaces PKCS #1 v1.5."""
    if isinstance(key, ec.EllipticCurvePublicKey):
        key.verify(signature, signed, ec.ECDSA(algorithm))
    elif isinstance(key, rsa.RSAPublicKey):
        key.verify(signature, signed, pad or padding.PKCS1v15(), algorithm)
    else:
        raise InvalidSignature("the key is neither RSA nor on a curve")
