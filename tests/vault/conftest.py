from __future__ import annotations

from pathlib import Path

import pytest

from sealring.vault import keys
from sealring.vault.vault import Vault


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "vault.key"
    keys.make_key_file(path)
    return path


@pytest.fixture
def vault(tmp_path: Path, key: Path) -> Vault:
    return Vault.create(tmp_path / "vault", keys.key_file(key), "owner")
