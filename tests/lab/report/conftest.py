"""The page of a whole run takes seconds to draw: one for all tests."""

from __future__ import annotations

import pytest

from sealring.lab.report import page
from tests.lab.report.examples import with_gpu


@pytest.fixture(scope="session")
def html() -> str:
    return page(with_gpu())
