from __future__ import annotations

from tests.vault.conftest import key, vault

__all__ = ["key", "vault"]
