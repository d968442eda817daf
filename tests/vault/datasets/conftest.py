from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sealring.vault import Dataset
from sealring.vault.vault import Vault
from tests.vault.datasets.made import COUNT, json_lines, sealed


@pytest.fixture
def dataset(vault: Vault, tmp_path: Path) -> Iterator[Dataset]:
    """JSON lines, numbered."""
    sealed(vault, json_lines(tmp_path / "source", count=COUNT))
    opened = Dataset(vault, "data")
    yield opened
    opened.close()
