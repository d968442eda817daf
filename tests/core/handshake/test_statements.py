"""The native reader of statements agrees with a second reader in this file."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence

import pytest

from sealring import _native
from sealring.core.handshake.statements import Statement, Statements, commitment_to
from sealring.core.handshake.terms import Terms, framed_group, integer_field
from sealring.errors import MalformedSetup
from tests.core.handshake.meeting import terms

VALUES = [bytearray([rank] * 32) for rank in range(3)]


def statement(rank: int, **changes: object) -> Statement:
    fields: dict[str, object] = {
        "rank": rank,
        "instance": f"{rank:032x}",
        "host": f"hôte-{rank}",
        "addresses": b'[["127.0.0.1",9]]' if rank else b"",
        "certificate": b"certificate" * (1 + rank),
        "commitment": commitment_to(VALUES[rank % 3]),
        "contribution": _native.Secret(bytes([rank + 1] * 32)),
    }
    return Statement(**(fields | changes))  # type: ignore[arg-type]


def fields_of(raw: bytes) -> list[bytes]:
    fields = []
    while raw:
        length = int.from_bytes(raw[:4], "big")
        fields.append(raw[4 : 4 + length])
        raw = raw[4 + length :]
    return fields


def framed(fields: Sequence[bytes]) -> bytes:
    return b"".join(len(each).to_bytes(4, "big") + each for each in fields)


def transcript(own: Terms, encoded: Sequence[bytes]) -> bytes:
    """Computes the transcript as docs/spec.md, section 4, defines it."""
    settings = json.dumps(own.settings, sort_keys=True, separators=(",", ":")).encode()
    fields = [settings]
    for each in encoded:
        rank, instance, host, addresses, certificate, commitment, secret = fields_of(each)
        digests = hashlib.sha256(certificate).digest(), hashlib.sha256(secret).digest()
        fields += [rank, instance, host, addresses, digests[0], commitment, digests[1]]
    before = framed([b"sealring 2 transcript"]) + framed_group(own)
    return hashlib.sha256(before + framed(fields)).digest()


def test_every_field_is_read_and_is_part_of_the_transcript() -> None:
    said = [statement(rank) for rank in range(3)]
    encoded = [bytes(each.encode()) for each in said]
    read = Statements(encoded)
    for each, member in zip(said, read.members, strict=True):
        assert (member.rank, member.instance, member.host) == (each.rank, each.instance, each.host)
        assert (member.addresses, member.certificate) == (each.addresses, each.certificate)
        assert member.fingerprint == hashlib.sha256(each.certificate).digest()
        assert member.contributes
    own = terms(0)
    assert read.transcript(own) == transcript(own, encoded)
    changes: list[dict[str, object]] = [
        {"instance": "f" * 32},
        {"host": "another"},
        {"addresses": b"[]"},
        {"certificate": b"another"},
        {"commitment": bytes(32)},
        {"contribution": _native.Secret(b"c" * 32)},
    ]
    for number, change in enumerate(changes):
        other = [*encoded]
        other[number % 3] = bytes(statement(number % 3, **change).encode())
        assert Statements(other).transcript(own) == transcript(own, other)
        assert transcript(own, other) != transcript(own, encoded)


def test_the_group_secret_is_from_every_contribution_in_order_and_is_given_once() -> None:
    encoded = [bytes(statement(rank).encode()) for rank in range(3)]
    read = Statements(encoded)
    together = _native.Secret(b"".join(bytes([rank + 1] * 32) for rank in range(3)))
    expected = together.derive(b"t" * 32, b"sealring 2 group secret", 32)
    assert read.group_secret(b"t" * 32) == expected
    with pytest.raises(RuntimeError):
        read.group_secret(b"t" * 32)


def test_the_first_value_that_was_not_committed_to_is_named() -> None:
    read = Statements([bytes(statement(rank).encode()) for rank in range(3)])
    assert read.wrong_value(VALUES) is None
    assert read.wrong_value([VALUES[0], VALUES[2], VALUES[1]]) == 1
    assert read.wrong_value([*VALUES[:2], bytearray(31)]) == 2
    assert read.wrong_value([bytearray(), *VALUES[1:]]) == 0


def test_zeros_contribute_nothing() -> None:
    zeros = statement(0, contribution=_native.Secret(bytes(32)))
    assert not Statements([zeros.encode()]).members[0].contributes


def good(raw: bytes) -> bool:
    """Tells whether these bytes are a statement by docs/spec.md."""
    fields = fields_of(raw)
    if framed(fields) != raw or len(fields) != 7:
        return False
    rank, instance, host, addresses, _, commitment, secret = fields
    try:
        name = host.decode()
    except UnicodeDecodeError:
        return False
    return (
        (len(rank), len(commitment), len(secret)) == (8, 32, 32)
        and len(instance) == 32
        and set(instance) <= set(b"0123456789abcdef")
        and 1 <= len(name) <= 255
        and name.isprintable()
        and len(addresses) <= 1024
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"instance": "F" * 32},
        {"instance": "f" * 31},
        {"host": ""},
        {"host": "a\nb"},
        {"host": "h" * 256},
        {"addresses": bytes(1025)},
        {"commitment": bytes(31)},
    ],
    ids=str,
)
def test_what_is_no_statement_is_malformed(changes: dict[str, object]) -> None:
    encoded = bytes(statement(0, **changes).encode())
    assert not good(encoded)
    with pytest.raises(MalformedSetup):
        Statements([encoded])


def test_changed_bytes_are_a_statement_or_malformed_by_both_readers() -> None:
    choose = random.Random(3)
    outcomes = set()
    for _ in range(4000):
        raw = bytearray(statement(1).encode())
        for _ in range(choose.choice([1, 1, 2])):
            place = choose.randrange(len(raw))
            raw[place] = choose.choice([0, raw[place] ^ 1 << choose.randrange(8), 0xC3])
        if choose.randrange(4) == 0:
            del raw[choose.randrange(len(raw)) :]
        expected = good(bytes(raw))
        outcomes.add(expected)
        try:
            (member,) = Statements([raw]).members
        except MalformedSetup:
            assert not expected, raw.hex()
        else:
            assert expected, raw.hex()
            assert integer_field(member.rank) == bytes(raw[4:12])
    assert outcomes == {True, False}
