"""Bundles of several members' bytes: each bundle that is written can be read, others not."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sealring.core.handshake.statements import MAX_STATEMENT_BYTES, encode_bundle, parse_bundle
from sealring.errors import MalformedSetup

ENTRIES = st.dictionaries(st.integers(0, 2**32 - 1), st.binary(max_size=50), max_size=8)


@given(ENTRIES, st.binary(max_size=40))
def test_what_is_written_is_read_in_the_order_of_the_ranks(
    entries: dict[int, bytes], head: bytes
) -> None:
    raw = encode_bundle(entries, head)
    assert raw.startswith(head)
    found = parse_bundle(raw, len(head))
    assert found == entries
    assert list(found) == sorted(entries)


@given(st.binary(max_size=60))
@example(b"\0\0\0\1\0\0\0\0" + b"\0\0\0\2\0\0\0\1x")
def test_any_bytes_are_a_bundle_as_it_is_written_or_refused(raw: bytes) -> None:
    try:
        entries = parse_bundle(raw)
    except MalformedSetup:
        return
    assert encode_bundle(entries) == raw


@pytest.mark.parametrize(
    "raw",
    [
        b"\0\0\0\1\0\0\0",
        b"\0\0\0\1\0\0\0\2x",
        b"\0\0\0\1\0\0\0\0" * 2,
        b"\0\0\0\2\0\0\0\0" + b"\0\0\0\1\0\0\0\0",
        b"\0\0\0\1" + (MAX_STATEMENT_BYTES + 1).to_bytes(4, "big") + bytes(MAX_STATEMENT_BYTES + 1),
        b"\0\0\0\1\xff\xff\xff\xff",
    ],
    ids=["half a header", "cut", "twice", "out of order", "too long", "longest"],
)
def test_what_is_no_bundle(raw: bytes) -> None:
    with pytest.raises(MalformedSetup, match="a bundle of members' messages is not one"):
        parse_bundle(raw)


def test_an_entry_may_be_as_long_as_a_statement() -> None:
    entries = {7: bytes(MAX_STATEMENT_BYTES)}
    assert parse_bundle(encode_bundle(entries)) == entries


def test_a_rank_that_is_none_is_not_written() -> None:
    with pytest.raises(RuntimeError, match="bad_cast"):
        encode_bundle({2**32: b""})
