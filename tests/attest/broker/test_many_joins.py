"""A thousand workers join at once. Each gets its own rank, and none gets another's."""

from __future__ import annotations

import pytest

from tests.attest.timing import join_seconds


@pytest.mark.timeout(900)  # ends a hang: on a busy machine a thousand joins take minutes
@pytest.mark.threat("B9")
def test_a_thousand_joins_at_once() -> None:
    # Raises unless all of them end with a certificate of their own.
    assert join_seconds(1000) > 0
