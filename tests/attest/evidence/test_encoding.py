"""Fixed structures, base64 and hexadecimal in one spelling, and ECDSA on the right curve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384

from sealring.attest.evidence.encoding import (
    at,
    check_ecdsa,
    first_value,
    from_base64,
    from_hex,
    numbers_of,
    places,
    read_structure,
    to_base64,
)
from sealring.errors import ForgedEvidence, MalformedEvidence

REFUSAL = MalformedEvidence("refused")


@dataclass(frozen=True)
class Structure:
    number: int = at(1, 2)
    name: bytes = at(4, 3)
    reserved: bytes = at(7, 2, zero=True)


def test_the_fields_of_a_structure() -> None:
    found = read_structure(Structure, b"\xff\x01\x02\xffabc\0\0more", "the structure")
    assert found == Structure(0x0201, b"abc", bytes(2))
    assert places(Structure)["name"] == (4, 3)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\xff\x01\x02\xffabc\0", "the structure is cut: 2 bytes wanted at 7"),
        (b"\xff", "the structure is cut: 2 bytes wanted at 1"),
        (b"\xff\x01\x02\xffabc\0\x01", "2 bytes of the structure at 7 are not zero"),
    ],
)
def test_a_structure_that_is_cut_or_not_zero(data: bytes, problem: str) -> None:
    with pytest.raises(MalformedEvidence, match=problem):
        read_structure(Structure, data, "the structure")


@pytest.mark.parametrize("url", [False, True])
def test_base64_has_one_spelling(url: bool) -> None:
    for raw in (b"", b"\xfb", b"\xfb\xff", b"\xfb\xff\xfe"):
        assert from_base64(to_base64(raw, url=url), REFUSAL, url=url) == raw
    # Bits that no byte has, another alphabet, a space, too much padding, and other types than text.
    odd: Any
    for odd in ("+x==" if not url else "-x", "-/8=", "+_8=", "+/ 8", "+/8==", b"+/8=", None, 3, []):
        with pytest.raises(MalformedEvidence, match="refused"):
            from_base64(odd, REFUSAL, url=url)


@pytest.mark.parametrize("odd", ["ABCD", "ab cd", "abc", "abcdef", "", None, 3])
def test_hexadecimal_has_one_spelling_and_one_size(odd: Any) -> None:
    assert from_hex("abcd", 2, REFUSAL) == b"\xab\xcd"
    with pytest.raises(MalformedEvidence, match="refused"):
        from_hex(odd, 2, REFUSAL)


def test_the_first_of_several_values() -> None:
    assert first_value(b"\x30\x02\x05\x00filling") == b"\x30\x02\x05\x00"
    for odd in (b"", b"\x30", b"\x30\x05\x00", b"\x3f\x81\x00"):
        with pytest.raises(ValueError, match=r"cut|plain tag"):
            first_value(odd)


def test_a_signature_by_another_key_or_on_another_curve() -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    numbers = decode_dss_signature(key.sign(b"signed", ec.ECDSA(SHA384())))
    both = b"".join(one.to_bytes(48, "big") for one in numbers)
    assert numbers_of(both) == numbers
    check_ecdsa(key.public_key(), numbers, b"signed", "the report")
    for other, signed, problem in (
        (key, b"other", "not signed by the key"),
        (ec.generate_private_key(ec.SECP384R1()), b"signed", "not signed by the key"),
        (ec.generate_private_key(ec.SECP256R1()), b"signed", "not on secp384r1"),
    ):
        with pytest.raises(ForgedEvidence, match=problem):
            check_ecdsa(other.public_key(), numbers, signed, "the report")
