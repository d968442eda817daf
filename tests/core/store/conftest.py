from __future__ import annotations

import pytest

from tests.core.store.server import Server


@pytest.fixture(scope="session")
def _running() -> Server:
    return Server()


@pytest.fixture
def server(_running: Server) -> Server:
    """One server for the whole session, emptied before each test."""
    for key in _running.store.list_keys():
        _running.store.delete_key(key)
    return _running
