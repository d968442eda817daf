from __future__ import annotations

from tests.broker.conftest import place

__all__ = ["place"]
