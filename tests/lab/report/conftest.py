"""One page of a whole run for all tests, because drawing it takes seconds."""

from __future__ import annotations

import pytest

from sealring.lab.report import page
from tests.lab.report.examples import with_gpu


@pytest.fixture(scope="session")
def html() -> str:
    return page(with_gpu())
