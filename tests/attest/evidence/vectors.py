"""Real evidence, if it lies beside the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

VECTORS = Path(__file__).parents[4] / "shared" / "vectors"


def vectors(folder: str) -> Path:
    found = VECTORS / folder
    if not found.exists():
        pytest.skip(f"real evidence is not beside this checkout ({found})")
    return found
