"""A store whose server is the adversary's: a real TCPStore, and a second connection to it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from sealring import _native
from sealring.store import SealedStore
from sealring.store.values import StoreKeys

KEYS = StoreKeys.derive(_native.Secret(bytes(range(32))), ["tests"])


def tcp_store() -> Any:
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )


class Server:
    def __init__(self) -> None:
        self.store = tcp_store()

    def worker(self, keys: StoreKeys = KEYS) -> SealedStore:
        """One worker's view, over a connection of its own."""
        return SealedStore(self.store.clone(), keys)

    def held(self, key: str, keys: StoreKeys = KEYS) -> bytes:
        return bytes(self.store.get(keys.value_name(key)))

    def put(self, key: str, raw: bytes, keys: StoreKeys = KEYS) -> None:
        self.store.set(keys.value_name(key), raw)
        self.store.get(keys.value_name(key))  # a TCPStore's set does not wait until it is done
