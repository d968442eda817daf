"""Values that fit their fields, and values of which others would come back."""

from __future__ import annotations

from array import array
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
        ("array:uint64", [2**64 - 1, 1.0], [2**64 - 1, 1]),
        ("array:uint64", (2**63 + 1, np.uint64(2**64 - 1)), [2**63 + 1, 2**64 - 1]),
        ("array:int64", [2**63 - 1, -(2**63), 2**53 + 1], [2**63 - 1, -(2**63), 2**53 + 1]),
        ("array:int64", np.array([-(2.0**63)]), [-(2**63)]),
        ("array:uint64", np.array([2.0**64 - 2048]), [2**64 - 2048]),
        ("array:int8", [True, False], [1, 0]),
        ("array:int8", np.array([1.0, -128.0], dtype=np.float16), [1, -128]),
        ("array:uint8", array("H", [255]), [255]),
        ("array:float64", [2**53, 0.1], [2.0**53, 0.1]),
        ("array:float32", [2**63, -1], [2.0**63, -1.0]),
        ("array:float16", np.array([2048, -65504]), [2048.0, -65504.0]),
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
        ("array:uint16", np.array([70000.0])),
        ("array:uint16", np.array([65536.0], dtype=np.float32)),
        ("array:uint16", np.array([float("inf")], dtype=np.float16)),
        ("array:int8", np.array([128])),
        ("array:uint64", [2**64 - 1, -1]),
        ("array:uint64", [2**64]),
        ("array:uint64", np.array([2.0**64])),
        ("array:uint64", np.array([-1])),
        ("array:int64", [2**63, -1]),
        ("array:int64", np.array([2.0**63])),
        ("array:int64", np.array([2**63], dtype=np.uint64)),
        ("array:float64", [2**53 + 1, 0.5]),
        ("array:float64", np.array([2**53 + 1])),
        ("array:float64", np.array([2**64 - 1], dtype=np.uint64)),
        ("array:float64", [2**1024]),
        ("array:float16", np.array([70000])),
        ("array:float64", np.array([1], dtype=np.longdouble)),
        ("array:uint16", [[1, 2]]),
        ("array:uint16", {1, 2}),
        ("array:uint16", "12"),
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


@pytest.mark.parametrize("bits", [0x7FF8000000000001, 0xFFF0000000000001, 0xFFF8000000000000])
def test_a_converted_nan_has_the_same_bytes_on_every_cpu(bits: int) -> None:
    """A conversion by the CPU keeps, cuts or sets other bits of a NaN, as its kind does."""
    nan = np.array([bits], dtype="<u8").view("<f8")
    for kind, quiet in (("array:float16", "007e"), ("array:float32", "0000c07f")):
        assert encoder([Field("value", kind)])({"value": nan}).hex() == quiet
    assert encoder([Field("value", "array:float64")])({"value": nan}) == nan.tobytes()
