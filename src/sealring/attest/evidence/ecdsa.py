"""ECDSA signatures in evidence have one spelling each.

With (r, s) every verifier also accepts (r, n - s), which anybody can compute, and hardware gives
either. A worker sends the one whose s is the smaller, and a verifier takes no other. The
certificates of a chain stay as their issuers wrote them.
"""

from __future__ import annotations

from typing import Final, Literal

from sealring.errors import MalformedEvidence

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
