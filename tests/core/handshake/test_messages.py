"""The parser of set-up messages takes one spelling, and refuses all other bytes with an error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.core.handshake import parse_hello, parse_message
from sealring.core.handshake.messages import encode_message, instances, write_hello
from sealring.errors import MalformedSetup, PeerIncompatible
from sealring.limits import MAX_SETUP_BYTES
from tests.codes import coded
from tests.core.handshake.meeting import terms

GOOD: dict[str, Any] = json.loads(write_hello(terms(1), 0))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=80),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


def test_a_hello_survives() -> None:
    hello = parse_hello(write_hello(terms(1), 0))
    assert (hello.sender, hello.receiver, hello.world) == (1, 0, 4)
    assert hello.settings == {"record_bytes": 131072}


@given(st.binary(max_size=200))
@pytest.mark.threat("W13")
def test_any_bytes(raw: bytes) -> None:
    with pytest.raises((MalformedSetup, PeerIncompatible)):
        parse_hello(raw)


@given(st.sampled_from(sorted(GOOD)), VALUES)
def test_any_value_in_any_field(field: str, value: object) -> None:
    try:
        hello = parse_hello(json.dumps(GOOD | {field: value}).encode())
    except (MalformedSetup, PeerIncompatible):
        return
    kept = value if field in ("type", "version") else getattr(hello, field)
    assert value == (list(kept) if isinstance(kept, tuple) else kept)


@pytest.mark.parametrize("field", sorted(GOOD))
def test_a_missing_field(field: str) -> None:
    with pytest.raises(MalformedSetup):
        parse_hello(encode_message({name: GOOD[name] for name in GOOD if name != field}))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"null",
        b'{"type": 1}',
        b'{"type": "a", "type": "a"}',
        b'{"type": "a", "n": 1.0}',
        b'{"type": "a", "n": NaN}',
        b'{"type": "a", "n": -Infinity}',
        b'{"type": "a", "n": 1e5}',
        b'{"type": "\xff"}',
        b'\xef\xbb\xbf{"type": "a"}',
        b"[" * 10_000,
        b'{"type": "a", "n": ' + b"9" * 5000 + b"}",
        b'{"type": "a"} ' + b" " * MAX_SETUP_BYTES,
    ],
)
def test_odd_json(raw: bytes) -> None:
    with pytest.raises(MalformedSetup):
        parse_message(raw)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", True),
        ("world", True),
        ("world", 0),
        ("world", 65537),
        ("sender", -1),
        ("sender", 65536),
        ("members", "0" * 63),
        ("members", "G" * 64),
        ("instance", "A" * 32),
        ("group", ""),
        ("group", "a\n"),
        ("group", "\ud800"),
        ("host", "x" * 256),
        ("settings", {"a": True}),
        ("settings", {"a": "1"}),
        ("settings", {str(n): 1 for n in range(33)}),
        ("suites", []),
        ("suites", ["a"] * 17),
        ("suites", [1]),
        ("job", "a/b"),
    ],
)
def test_values_out_of_bounds(field: str, value: object) -> None:
    with pytest.raises(MalformedSetup):
        parse_hello(encode_message(GOOD | {field: value}))


@pytest.mark.threat("D1")
def test_a_later_version_is_told_so_whatever_else_it_says() -> None:
    with pytest.raises(
        PeerIncompatible, match="version 4", check=coded("handshake.protocol_mismatch")
    ):
        parse_hello(b'{"type": "hello", "version": 4, "shape": "round"}')


def test_a_message_that_is_too_long_is_not_written() -> None:
    with pytest.raises(MalformedSetup):
        encode_message({"type": "x" * MAX_SETUP_BYTES})


@pytest.mark.parametrize("rank", ["9" * 5000, "65536", "01", "-1", ""])
def test_instances_of_what_is_no_rank(rank: str) -> None:
    message = {"type": "linked", "instances": {rank: "0" * 32}}
    with pytest.raises(MalformedSetup, match="no rank"):
        instances(message, "instances")
