from __future__ import annotations

from tests.attest.broker.conftest import place

__all__ = ["place"]
