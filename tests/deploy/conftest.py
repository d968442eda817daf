from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can enter, which pytest's own are not."""
    folder = Path(tempfile.mkdtemp(prefix="sealring-pod-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)
