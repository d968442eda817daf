from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attest.broker.local import Place, Running, running


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def broker(place: Place) -> Iterator[Running]:
    with running(place) as found:
        yield found
