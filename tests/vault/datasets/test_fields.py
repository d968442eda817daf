"""Values that fit their fields, and values of which others would come back."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from sealring.errors import BadSource
from sealring.vault.datasets.fields import Field, decoder, encoder


def back(kind: str, value: Any) -> Any:
    fields = [Field("value", kind), Field("other", "int64")]
    encoded = encoder(fields)({"value": value, "other": 1})
    return decoder(fields)(memoryview(encoded))["value"]


@pytest.mark.parametrize(
    ("kind", "value", "wanted"),
    [
        ("array:uint16", [1.0, 65535.0], [1, 65535]),
        ("array:uint64", [2**64 - 1, 0], [2**64 - 1, 0]),
        ("array:int8", [True, False], [1, 0]),
        ("array:float32", [0.1, float("inf")], [float(np.float32(0.1)), float("inf")]),
        ("array:uint16", [], []),
        ("array:uint16", np.array([1, 2], dtype=">u2"), [1, 2]),
        ("bytes", bytearray(b"x"), b"x"),
        ("bool", np.bool_(False), False),
        ("files", {"a": np.arange(2, dtype="<u2")}, {"a": b"\0\0\1\0"}),
        ("json", [date(2026, 1, 2), Decimal("0.10")], ["2026-01-02", "0.10"]),
    ],
)
def test_values_that_fit(kind: str, value: Any, wanted: Any) -> None:
    found = back(kind, value)
    assert (found.tolist() if isinstance(found, np.ndarray) else found) == wanted


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("array:uint16", [1.5]),
        ("array:uint16", [70000.0]),
        ("array:uint16", [float("nan")]),
        ("array:uint16", ["12"]),
        ("array:uint64", [2**64 - 1, -1]),
        ("array:float32", [1e300]),
        ("array:float32", [None]),
        ("array:float32", [1 + 2j]),
        ("array:int64", np.array(["2026-01-02"], dtype="M8[D]")),
        ("bytes", 5),
        ("bool", "false"),
        ("files", {"a": [1, 2]}),
        ("json", b"no JSON"),
        ("json", {"a": np.arange(2000)}),
        ("json", {"a": np.int64(3)}),
        ("json", [{1, 2}]),
    ],
)
def test_values_that_would_come_back_as_others(kind: str, value: Any) -> None:
    with pytest.raises(BadSource, match="'value' does not fit its field"):
        back(kind, value)
