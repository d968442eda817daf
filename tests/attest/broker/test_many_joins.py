"""A thousand workers at once: each gets its own rank, and none gets another's."""

from __future__ import annotations

import pytest

from tests.attest.timing import join_seconds


@pytest.mark.timeout(900)  # it ends a hang; a thousand joins take minutes of a busy machine
@pytest.mark.threat("B9")
def test_a_thousand_joins_at_once() -> None:
    # It raises unless all of them end with a certificate of their own.
    assert join_seconds(1000) > 0
