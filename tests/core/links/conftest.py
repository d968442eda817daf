from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture
def no_descriptor_is_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before
