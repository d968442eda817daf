from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.workers import Workers

# A shell's background jobs ignore it, as do their children: half of `make test` is such a job.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Four worker processes for the whole session."""
    started = Workers(4)
    yield started
    started.close()
