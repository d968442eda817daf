"""Untrusted JSON is refused where two readers could take it for different values."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from sealring.errors import ConfigurationError, MalformedEvidence
from sealring.formats.strict import MAX_DEPTH, read_as, read_json, read_object


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


@dataclass(frozen=True, slots=True)
class Part:
    first: int
    end: int | None

    def __post_init__(self) -> None:
        if self.end is not None and self.end < self.first:
            raise ConfigurationError("a part ends before it starts")


@dataclass(frozen=True, slots=True)
class Whole:
    name: str
    parts: list[Part]


def test_a_declared_shape_is_read() -> None:
    text = '{"name": "a", "parts": [{"first": 1, "end": null}]}'
    assert read_as(Whole, text, "it", "whole") == Whole("a", [Part(1, None)])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "it is not JSON that can be used: "),
        ("[]", "it is not what a whole has there"),
        ('{"name": "a"}', "it is not what a whole has there"),
        ('{"name": "a", "parts": [], "more": 1}', "it is not what a whole has there"),
        ('{"name": 1, "parts": []}', "it: name is not what a whole has there"),
        ('{"name": "\\ud800", "parts": []}', "it: name is not what a whole has there"),
        ('{"name": "a", "parts": {}}', "it: parts is not what a whole has there"),
        (
            '{"name": "a", "parts": [{"first": true, "end": 2}]}',
            "it: parts[0]: first is not what a whole has there",
        ),
        (
            '{"name": "a", "parts": [{"first": -1, "end": 2}]}',
            "it: parts[0]: first is not what a whole has there",
        ),
        ('{"name": "a", "parts": [{"first": 3, "end": 2}]}', "a part ends before it starts"),
    ],
)
def test_another_shape_is_the_callers_error_and_says_where(text: str, said: str) -> None:
    with pytest.raises(MalformedEvidence) as problem:
        read_as(Whole, text, "it", "whole", MalformedEvidence)
    assert str(problem.value).startswith(said)
