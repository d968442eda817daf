"""A thousand workers at once: each gets its own rank, and none gets another's."""

from __future__ import annotations

from sealring.bench.joins import measure_joins


def test_a_thousand_joins_at_once() -> None:
    # It raises unless all of them end with a certificate of their own.
    assert measure_joins(1000).workers == 1000
