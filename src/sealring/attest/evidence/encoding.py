"""Binary evidence: a cursor, DER as TPM makers write it, the one spelling of ECDSA signatures."""

from __future__ import annotations

from typing import Final, Literal

from sealring.errors import MalformedEvidence


class Cursor:
    def __init__(self, data: bytes, what: str, order: Literal["little", "big"]) -> None:
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
        """Bytes behind their own count."""
        return self.take(self.number(size_bytes))

    def end(self) -> None:
        if self.left:
            raise MalformedEvidence(f"{self._what} has {self.left} bytes too many")


_SET: Final = 0x31
_CONSTRUCTED: Final = 0x20
_MAX_DEPTH: Final = 16


def with_sets_in_order(der: bytes, depth: int = 0) -> bytes:
    """The same values, of the same size. ValueError: not DER in other respects either."""
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


def _in_order(head: bytes, body: bytes, depth: int) -> bytes:
    if not head[0] & _CONSTRUCTED:
        return head + body
    inside = with_sets_in_order(body, depth + 1)
    if head[0] == _SET:
        inside = b"".join(sorted(inside[start:end] for start, _, end in _members(inside)))
    return head + inside


def _members(der: bytes) -> list[tuple[int, int, int]]:
    """Where each value begins, where its body does, and where it ends."""
    found, at = [], 0
    while at < len(der):
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
        found.append((at, body, body + size))
        at = body + size
    return found


P256_ORDER: Final = int("FFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551", 16)
P384_ORDER: Final = int(
    "FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF"
    "C7634D81F4372DDF581A0DB248B0A77AECEC196ACCC52973",
    16,
)
ORDERS: Final = {"secp256r1": P256_ORDER, "secp384r1": P384_ORDER}


def with_lower_s(
    data: bytes, at: int, size: int, order: int, byteorder: Literal["little", "big"] = "big"
) -> bytes:
    """The data with the s at this place replaced by n - s, if that is the smaller."""
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
