from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.workers import Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Four worker processes for the whole session."""
    started = Workers(4)
    yield started
    started.close()
