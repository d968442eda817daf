"""A store whose server the adversary controls: a real TCPStore and a second connection to it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from sealring import _native
from sealring.core.store import SealedStore
from sealring.core.store.values import StoreKeys

KEYS = StoreKeys.derive(_native.Secret(bytes(range(32))), ["tests"])


class Settled:
    """A TCPStore whose `set` and `append` return only when they are done.

    torch's return earlier, so another connection could still find the old value.
    """

    def __init__(self, store: Any) -> None:
        self._beneath = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._beneath, name)

    def set(self, key: str, value: str | bytes) -> None:
        self._beneath.set(key, value)
        self._beneath.check([key])  # one connection's requests are answered in order

    def append(self, key: str, value: str | bytes) -> None:
        self._beneath.append(key, value)
        self._beneath.check([key])

    def clone(self) -> Any:
        return Settled(self._beneath.clone())


def tcp_store() -> Any:
    return Settled(
        dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
    )


class Server:
    def __init__(self) -> None:
        self.store = tcp_store()

    def worker(self, keys: StoreKeys = KEYS) -> SealedStore:
        """Returns one worker's view of the store, over its own connection."""
        return SealedStore(self.store.clone(), keys)

    def held(self, key: str, keys: StoreKeys = KEYS) -> bytes:
        return bytes(self.store.get(keys.value_name(key)))

    def put(self, key: str, raw: bytes, keys: StoreKeys = KEYS) -> None:
        self.store.set(keys.value_name(key), raw)
