"""Untrusted JSON: what one reader takes for another value than the next one is refused."""

from __future__ import annotations

import json

import pytest

from sealring.errors import MalformedEvidence
from sealring.formats.strict import MAX_DEPTH, read_json, read_object


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": 1, "a": 1}', "a key twice"),
        ('[{"b": {"a": 1, "a": 2}}]', "a key twice"),
        ("[NaN]", "NaN is not a number"),
        ("-Infinity", "-Infinity is not a number"),
        ("[1] 2", "Extra data"),
        ("[" * 100_000 + "]" * 100_000, "deep"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "deep"),
        ('{"a":[' * MAX_DEPTH + "]}" * MAX_DEPTH, "deep"),
        ("9" * 5000, "limit"),
        ("[1]".encode("utf-16"), "utf-8"),
        (b"\xef\xbb\xbf[]", "Expecting value"),
        (b'"\xff"', "utf-8"),
    ],
    ids=range(12),
)
def test_what_is_refused(text: str | bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_json(text)


def test_what_is_read() -> None:
    value = {"a": [1, -2.5, True, None, "ü"], "b": {}}
    assert read_json(json.dumps(value)) == read_json(json.dumps(value).encode()) == value
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert json.dumps(read_json(deep)) == deep
    assert read_json(f"[{'[],' * 10_000}[]]") == [[]] * 10_001


def test_a_limit_of_size() -> None:
    assert read_json(b"[  ]", 4) == []
    with pytest.raises(ValueError, match="more than 4 bytes"):
        read_json(b"[   ]", 4)


def test_which_numbers_pass() -> None:
    assert read_json("[1, -3]", numbers="whole") == [1, -3]
    for text in ("1.0", "1e3", "NaN"):
        with pytest.raises(ValueError, match="is not a number"):
            read_json(text, numbers="whole")
    assert str(read_json("[NaN, 1.5]", numbers="any")) == "[nan, 1.5]"


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1, "a": 1}', b"\xff"])
def test_what_is_no_object_is_the_refusal(text: str | bytes) -> None:
    with pytest.raises(MalformedEvidence, match=r"^not this$"):
        read_object(text, MalformedEvidence("not this"))
